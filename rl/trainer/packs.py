"""Packs: what one forward pass takes of a batch, in one of two layouts.

Padded: a row for each rollout, rollouts of like length together. Attention is causal, so what stands behind a row's end reaches
none of its tokens and needs no mask.

Shared: one row, in which the rollouts of a prompt follow it one after the other and each sees the prompt and itself. A prompt is
computed once instead of once for each of its rollouts, which is most of the work where answers are short. Groups of any number stand
side by side and do not see each other. The mask is of L^2, so that this is for packs of a few thousand tokens.

Shape letters: N rollouts and S output tokens of a batch, B rollouts of a pack and T output tokens of its longest, R rows, L tokens of
a row, K positions whose logits are wanted, M output tokens of the pack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from rl.trainer.batch import Sample


@dataclass(frozen=True)
class Pack:
    rows_B: Tensor
    """Which of the batch's rollouts these are."""
    tokens_RL: Tensor
    kept_K: Tensor
    """Positions in L."""
    source_M: Tensor
    """Which of the R x K logits each output token is drawn from."""
    next_M: Tensor
    """The token that was drawn."""
    rollout_M: Tensor
    """Of which of the pack's rollouts."""
    slot_M: Tensor
    """Which of that rollout's output tokens it is."""
    temperature_M: Tensor
    positions_RL: Tensor | None = None
    """None: 0, 1, 2, ..."""
    attention_RRLL: Tensor | None = None
    """[1, 1, L, L] of the shared layout: whether a token (third) sees another (fourth)."""

    @property
    def mask(self) -> Tensor:
        """[B, T]: whether a rollout has that output token."""
        return self.by_rollout(torch.ones_like(self.slot_M)).bool()

    def by_rollout(self, values_M: Tensor) -> Tensor:
        """[B, T] of the values by output token, 0 beyond a rollout's end."""
        empty_BT = values_M.new_zeros(len(self.rows_B), int(self.slot_M.max()) + 1)
        return empty_BT.index_put((self.rollout_M, self.slot_M), values_M)

    def take(self, values_NS: Tensor) -> Tensor:
        """[B, T] of the batch's values; those beyond a rollout's end mean nothing."""
        return values_NS[self.rows_B, : int(self.slot_M.max()) + 1]

    def put(self, values_BT: Tensor, into_NS: Tensor) -> None:
        """Write the values to their places in the batch."""
        into_NS[self.rows_B[self.rollout_M], self.slot_M] = values_BT[self.rollout_M, self.slot_M]

    def to(self, device: torch.device) -> Pack:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()})


def make_packs(samples: Sequence[Sample], rows: Sequence[int], pack_tokens: int, *, share_prompts: bool) -> list[Pack]:
    """The rollouts at `rows`, each in one pack of at most `pack_tokens` tokens, or alone in one. Equal inputs give equal packs.

    share_prompts: rollouts of one prompt stand in the shared layout where two or more of them fit.
    """
    families = list(_families(samples, sorted(rows), pack_tokens)) if share_prompts else [[row] for row in rows]
    packs: list[list[list[int]]] = []
    room = 0
    for family in (family for family in families if len(family) > 1):
        size = _family_tokens(samples, family)
        if size > room:
            packs.append([])
            room = pack_tokens
        packs[-1].append(family)
        room -= size
    alone = [family[0] for family in families if len(family) == 1]
    return [_shared(samples, pack) for pack in packs] + [
        _padded(samples, pack) for pack in _like_lengths(samples, alone, pack_tokens)
    ]


def behaviour_logprobs(samples: Sequence[Sample]) -> Tensor:
    """[N, S], 0 beyond a rollout's end."""
    behaviour_NS = torch.zeros(len(samples), max(sample.num_outputs for sample in samples))
    for row, sample in enumerate(samples):
        behaviour_NS[row, : sample.num_outputs] = torch.tensor(sample.behaviour_logprobs)
    return behaviour_NS


def _families(samples: Sequence[Sample], rows: Sequence[int], pack_tokens: int) -> Iterator[list[int]]:
    """Rows of one prompt that fit into a pack together."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        by_prompt.setdefault(samples[row].prompt, []).append(row)
    for members in by_prompt.values():
        family: list[int] = []
        for row in members:
            if family and _family_tokens(samples, [*family, row]) > pack_tokens:
                yield family
                family = []
            family.append(row)
        yield family


def _family_tokens(samples: Sequence[Sample], family: Sequence[int]) -> int:
    """A rollout's last token is answered by nothing: it is no input."""
    prompt = len(samples[family[0]].prompt)
    return prompt + sum(len(samples[row].token_ids) - 1 - prompt for row in family)


def _like_lengths(samples: Sequence[Sample], rows: Sequence[int], pack_tokens: int) -> list[list[int]]:
    packs: list[list[int]] = []
    for row in sorted(rows, key=lambda row: (len(samples[row].token_ids), row)):
        if packs and (len(packs[-1]) + 1) * len(samples[row].token_ids) <= pack_tokens:
            packs[-1].append(row)
        else:
            packs.append([row])
    return packs


def _padded(samples: Sequence[Sample], rows: Sequence[int]) -> Pack:
    length = max(len(samples[row].token_ids) for row in rows) - 1
    kept = sorted({position - 1 for row in rows for position in samples[row].output_positions})
    column = {position: index for index, position in enumerate(kept)}
    tokens_RL = torch.zeros(len(rows), length, dtype=torch.int64)
    sources: list[int] = []
    for place, row in enumerate(rows):
        tokens_RL[place, : len(samples[row].token_ids) - 1] = torch.tensor(samples[row].token_ids[:-1])
        sources += [place * len(kept) + column[position - 1] for position in samples[row].output_positions]
    return _pack(samples, rows, tokens_RL, kept, sources)


def _shared(samples: Sequence[Sample], families: Sequence[Sequence[int]]) -> Pack:
    tokens: list[int] = []
    positions: list[int] = []
    owners: list[tuple[int, int]] = []
    """(family, rollout) of each token; a prompt is of rollout -1."""
    drawn_from: list[int] = []
    for number, family in enumerate(families):
        prompt, begin = samples[family[0]].prompt, len(tokens)
        tokens += prompt
        positions += range(len(prompt))
        owners += [(number, -1)] * len(prompt)
        for row in family:
            sample, shift = samples[row], len(tokens) - len(prompt)
            rest = sample.token_ids[len(prompt) : -1]
            tokens += rest
            positions += range(len(prompt), len(prompt) + len(rest))
            owners += [(number, row)] * len(rest)
            before = [position - 1 for position in sample.output_positions]
            drawn_from += [begin + place if place < len(prompt) else shift + place for place in before]
    kept = sorted(set(drawn_from))
    column = {position: index for index, position in enumerate(kept)}
    family_L, rollout_L = torch.tensor(owners).T
    sees_LL = (family_L[:, None] == family_L) & ((rollout_L == -1) | (rollout_L[:, None] == rollout_L))
    rows = [row for family in families for row in family]
    pack = _pack(samples, rows, torch.tensor([tokens]), kept, [column[position] for position in drawn_from])
    return replace(pack, positions_RL=torch.tensor([positions]), attention_RRLL=sees_LL.tril()[None, None])


def _pack(
    samples: Sequence[Sample], rows: Sequence[int], tokens_RL: Tensor, kept: Sequence[int], sources: Sequence[int]
) -> Pack:
    outputs = [(place, slot) for place, row in enumerate(rows) for slot in range(samples[row].num_outputs)]
    chosen = [samples[row] for row in rows]
    return Pack(
        rows_B=torch.tensor(rows),
        tokens_RL=tokens_RL,
        kept_K=torch.tensor(kept),
        source_M=torch.tensor(sources),
        next_M=torch.tensor([sample.token_ids[position] for sample in chosen for position in sample.output_positions]),
        rollout_M=torch.tensor([place for place, _ in outputs]),
        slot_M=torch.tensor([slot for _, slot in outputs]),
        temperature_M=torch.tensor([sample.trajectory.temperature for sample in chosen for _ in sample.output_positions]),
    )
