"""The draft vocabulary: which target tokens the draft can propose, and how well they cover what the target says.

Head rows are copies of the target's, so a trained core works with any map and each published draft may bring its own.

Shape letters: V target vocabulary, U draft vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wire.errors import ArtifactError, ConfigError
from wire.spec import read_model_config

WANTED_COVERAGE = 0.98
"""Of what the target says in each domain; a draft cannot have a token accepted that it cannot propose."""
_ID_KEYS = ("eos_token_id", "bos_token_id", "pad_token_id")


@dataclass(frozen=True)
class DraftVocabulary:
    """Ascending target ids [U] int64; the position of an id is its draft id."""

    ids_U: Tensor
    vocab_size: int

    def __post_init__(self) -> None:
        ids = self.ids_U
        if ids.dtype != torch.int64 or ids.ndim != 1 or ids.numel() == 0:
            raise ArtifactError(f"a draft vocabulary is a vector of int64 ids, got {ids.dtype} {tuple(ids.shape)}")
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size or ids.unique().numel() != ids.numel():
            raise ArtifactError(f"draft vocabulary ids must be distinct and lie in 0..{self.vocab_size - 1}")

    @property
    def offsets_U(self) -> Tensor:  # noqa: N802
        """`d2t` as vLLM stores it: target id minus draft id."""
        return self.ids_U - torch.arange(self.ids_U.numel())

    @property
    def draft_ids_V(self) -> Tensor:  # noqa: N802
        """Draft id of every target id, -1 where the draft cannot propose it."""
        draft_ids_V = torch.full((self.vocab_size,), -1, dtype=torch.int64)
        draft_ids_V[self.ids_U] = torch.arange(self.ids_U.numel())
        return draft_ids_V

    @property
    def sha256(self) -> str:
        """Of the raw little-endian int64 bytes of `d2t`."""
        return hashlib.sha256(self.offsets_U.contiguous().numpy().astype("<i8").tobytes()).hexdigest()

    @classmethod
    def from_offsets(cls, offsets_U: Tensor, vocab_size: int) -> DraftVocabulary:
        """Raises ArtifactError for offsets that name no or the same token twice."""
        return cls(offsets_U + torch.arange(offsets_U.numel()), vocab_size)


def choose_vocabulary(
    counts_V: Tensor, control_ids: Sequence[int], size: int, domain_counts: Sequence[Tensor] = ()
) -> DraftVocabulary:
    """The `size` ids to propose: control ids always, then what each domain needs, then by count, unseen ones by id.

    counts_V [V]: how often the target emitted each token; domain_counts: the same for each domain whose coverage counts, each [V].
    What domains need goes in by the share each has covered by then, so where the size is too small for all of it they are covered
    alike. A BPE id is the age of its merge, so low ids stand in for frequency where nothing was observed (a prior, not a
    ranking of the traffic). Deterministic.
    """
    vocab_size = counts_V.numel()
    if not 0 < size <= vocab_size:
        raise ConfigError(f"a draft vocabulary of {size} does not fit a target vocabulary of {vocab_size}")
    counts_V = counts_V.to(torch.float64)
    level_V = _needed_at(domain_counts, vocab_size)
    rank_V = torch.where(level_V < WANTED_COVERAGE, 2.0 - level_V, counts_V / (counts_V.max() + 1.0))
    rank_V[_forced(control_ids, vocab_size)[:size]] = float("inf")
    order_V = torch.sort(rank_V, descending=True, stable=True).indices
    return DraftVocabulary(order_V[:size].sort().values, vocab_size)


@dataclass(frozen=True)
class SeenTokens:
    """What the target said in one domain, in so many requests: how often each token [V], and the same of those that only one
    request said, 0 for all others."""

    counts_V: Tensor
    lone_V: Tensor

    @property
    def missing_share(self) -> float:
        """Expected share of the next request's tokens that none said so far, 0 without any.

        Good-Turing (Good 1953) by requests: what would be unseen in each if it were the next one, which leaves it out of the
        others. By tokens it were half of that, since a request says a rare word more than once.
        """
        return float(self.lone_V.sum()) / max(float(self.counts_V.sum()), 1.0)


def wanted_size(control_ids: Sequence[int], domains: Sequence[SeenTokens], vocab_size: int) -> int:
    """Ids of a vocabulary that has the control ids and can be expected to cover WANTED_COVERAGE of what each domain says next.

    Seen tokens cover all but the missing share. Where that is not enough, unseen ones are taken by id as `choose_vocabulary` takes
    them, as far as the ids of tokens that one request alone said tell where the missing ones are.
    """
    is_wanted_V = torch.zeros(vocab_size, dtype=torch.bool)
    for tokens in domains:
        is_wanted_V |= _wanted_of(tokens)
    is_wanted_V[_forced(control_ids, vocab_size)] = True
    return int(is_wanted_V.sum())


def _wanted_of(tokens: SeenTokens) -> Tensor:
    """Which ids [V] one domain asks for."""
    missing, allowed = tokens.missing_share, 1.0 - WANTED_COVERAGE
    level_V = _needed_at([tokens.counts_V], tokens.counts_V.numel())
    if missing <= allowed:
        return level_V < WANTED_COVERAGE / (1.0 - missing)
    lone_share_V = tokens.lone_V.to(torch.float64).cumsum(0) / float(tokens.lone_V.sum())
    last_id = int((lone_share_V < (missing - allowed) / missing).sum())
    is_seen_V = tokens.counts_V > 0
    return is_seen_V | (torch.arange(is_seen_V.numel()) <= last_id)


def _needed_at(domain_counts: Sequence[Tensor], vocab_size: int) -> Tensor:
    """Of every id [V], the least share of a domain that its more frequent tokens cover; 1 where none says it."""
    level_V = torch.ones(vocab_size, dtype=torch.float64)
    for counts_V in domain_counts:
        said_V, order_V = torch.sort(counts_V.to(torch.float64), descending=True, stable=True)
        num_said = int((said_V > 0).sum())
        covered = (said_V.cumsum(0) - said_V)[:num_said] / said_V.sum()
        level_V[order_V[:num_said]] = torch.minimum(level_V[order_V[:num_said]], covered)
    return level_V


def _forced(control_ids: Sequence[int], vocab_size: int) -> list[int]:
    return sorted({token for token in control_ids if 0 <= token < vocab_size})


def coverage(counts_V: Tensor, vocabulary: DraftVocabulary) -> float:
    """Share of observed tokens that the draft can propose, 1.0 when nothing was observed: a hard cap on acceptance."""
    total = float(counts_V.sum())
    return float(counts_V[vocabulary.ids_U].sum()) / total if total else 1.0


def better_vocabulary(
    counts_V: Tensor,
    control_ids: Sequence[int],
    present: DraftVocabulary,
    min_gain: float,
    domain_counts: Sequence[Tensor] = (),
) -> DraftVocabulary | None:
    """The vocabulary of the same size that the counts ask for; None where it would not add more than `min_gain` coverage.

    That of the worst domain, up to WANTED_COVERAGE, or that of all together where the worst domain is covered no less.
    """
    chosen = choose_vocabulary(counts_V, control_ids, present.ids_U.numel(), domain_counts)
    worst_gain = _worst_coverage(domain_counts, chosen) - _worst_coverage(domain_counts, present)
    gain = coverage(counts_V, chosen) - coverage(counts_V, present)
    return chosen if worst_gain > min_gain or (worst_gain >= 0 and gain > min_gain) else None


def _worst_coverage(domain_counts: Sequence[Tensor], vocabulary: DraftVocabulary) -> float:
    """Up to WANTED_COVERAGE."""
    return min([WANTED_COVERAGE, *(coverage(counts_V, vocabulary) for counts_V in domain_counts)])


def control_token_ids(target_dir: Path) -> list[int]:
    """Ids that end or structure a turn: eos, bos and pad, and the special tokens the chat template writes."""
    ids: set[int] = set()
    for config in (read_model_config(target_dir), _read_json(target_dir / "generation_config.json")):
        for key in _ID_KEYS:
            value = config.get(key)
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
    template = _chat_template(target_dir)
    for token in _read_json(target_dir / "tokenizer.json").get("added_tokens", []):
        if token.get("special") and token.get("content", "") in template:
            ids.add(int(token["id"]))
    return sorted(ids)


def _chat_template(target_dir: Path) -> str:
    path = target_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    return str(_read_json(target_dir / "tokenizer_config.json").get("chat_template") or "")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        parsed: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    return parsed
