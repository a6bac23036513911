"""Packs: rollouts of like length, padded on the right, as one forward pass takes them.

Attention is causal, so what a row's padding holds reaches none of its tokens and needs no mask.

Shape letters: B rollouts of a pack, L token positions, T those whose next token some rollout of the pack drew, N rollouts and
S output tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.trainer.batch import Sample


@dataclass(frozen=True)
class Pack:
    rows_B: Tensor
    """Which of the batch's rollouts these are."""
    tokens_BL: Tensor
    kept_T: Tensor
    """Positions in L whose logits are wanted."""
    next_BT: Tensor
    """The token that follows each."""
    mask_BT: Tensor
    """Whether the policy drew it."""
    slots_BT: Tensor
    """Which of its rollout's output tokens it is; 0 outside the mask."""
    temperature_B: Tensor

    def take(self, values_NS: Tensor) -> Tensor:
        """[B, T] of the batch's values by output token; those outside the mask mean nothing."""
        return values_NS[self.rows_B].gather(1, self.slots_BT)

    def put(self, values_BT: Tensor, into_NS: Tensor) -> None:
        """Write the values of the mask's tokens to their places in the batch."""
        rows_BT = self.rows_B[:, None].expand_as(self.slots_BT)
        into_NS[rows_BT[self.mask_BT], self.slots_BT[self.mask_BT]] = values_BT[self.mask_BT]


def make_packs(samples: Sequence[Sample], rows: Sequence[int], pack_tokens: int, device: torch.device) -> list[Pack]:
    """The rollouts at `rows`, shortest first, each in one pack. Equal inputs give equal packs."""
    ordered = sorted(rows, key=lambda row: (len(samples[row].token_ids), row))
    packs: list[list[int]] = []
    for row in ordered:
        length = len(samples[row].token_ids)
        if packs and (len(packs[-1]) + 1) * length <= pack_tokens:
            packs[-1].append(row)
        else:
            packs.append([row])
    return [_pack(samples, pack, device) for pack in packs]


def behaviour_logprobs(samples: Sequence[Sample], device: torch.device) -> Tensor:
    """[N, S], 0 beyond a rollout's end."""
    behaviour_NS = torch.zeros(len(samples), max(sample.num_outputs for sample in samples))
    for row, sample in enumerate(samples):
        behaviour_NS[row, : sample.num_outputs] = torch.tensor(sample.behaviour_logprobs)
    return behaviour_NS.to(device)


def _pack(samples: Sequence[Sample], rows: Sequence[int], device: torch.device) -> Pack:
    # The last token is answered by nothing: it is no input.
    length = max(len(samples[row].token_ids) for row in rows) - 1
    kept = sorted({position - 1 for row in rows for position in samples[row].output_positions})
    column = {position: index for index, position in enumerate(kept)}
    tokens_BL = torch.zeros(len(rows), length, dtype=torch.int64)
    next_BT = torch.zeros(len(rows), len(kept), dtype=torch.int64)
    slots_BT = torch.zeros_like(next_BT)
    mask_BT = torch.zeros_like(next_BT, dtype=torch.bool)
    for place, row in enumerate(rows):
        sample = samples[row]
        ids = torch.tensor(sample.token_ids)
        tokens_BL[place, : len(ids) - 1] = ids[:-1]
        drawn = torch.tensor(sample.output_positions)
        columns = torch.tensor([column[position - 1] for position in sample.output_positions])
        next_BT[place, columns] = ids[drawn]
        slots_BT[place, columns] = torch.arange(len(columns))
        mask_BT[place, columns] = True
    temperature_B = torch.tensor([samples[row].trajectory.temperature for row in rows])
    every = (torch.tensor(rows), tokens_BL, torch.tensor(kept), next_BT, mask_BT, slots_BT, temperature_B)
    return Pack(*(tensor.to(device) for tensor in every))
