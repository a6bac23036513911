"""How many tokens of a step were learned from, and how many were held, cut or left out. Counts of parts add up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenCounts:
    num_tokens: int = 0
    num_masked: int = 0
    """Left out by a token's or a sequence's importance ratio."""
    num_truncated: int = 0
    """Whose importance weight was cut to the cap."""
    num_clipped_high: int = 0
    """Advantage above 0 and the policy's ratio above its limit: no gradient (CISPO: of either sign, and a smaller gradient)."""
    num_clipped_low: int = 0
    """Advantage below 0 and the ratio below its limit (CISPO: of either sign, and a larger gradient)."""

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            self.num_tokens + other.num_tokens,
            self.num_masked + other.num_masked,
            self.num_truncated + other.num_truncated,
            self.num_clipped_high + other.num_clipped_high,
            self.num_clipped_low + other.num_clipped_low,
        )

    @property
    def as_list(self) -> list[int]:
        """In the order of the fields."""
        return [self.num_tokens, self.num_masked, self.num_truncated, self.num_clipped_high, self.num_clipped_low]

    @property
    def masked_fraction(self) -> float:
        return self._fraction(self.num_masked)

    @property
    def truncated_fraction(self) -> float:
        return self._fraction(self.num_truncated)

    @property
    def clipped_fraction(self) -> float:
        return self._fraction(self.num_clipped_high + self.num_clipped_low)

    def _fraction(self, count: int) -> float:
        """0 where there are no tokens."""
        return count / max(self.num_tokens, 1)
