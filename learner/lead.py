"""The leading rank's trainer: it tells the other ranks what to do, then does its own part of it.

Everything a learner does besides training (receiving, replay, gate, publishing, reports) happens on the leading rank alone, which
uses this trainer like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from drafter.draft import HEAD_NAME, MAP_NAME, Draft
from drafter.head import Head
from drafter.target import TargetParts
from learner.config import TrainSettings
from learner.orders import Gather, GatherAverage, Learn, Load, Order, OrderChannel, Start, UseHead
from learner.request import CapturedRequest
from learner.sharded import ShardedRanks
from learner.trainer import Trainer


class LeadingTrainer(Trainer):
    """Rank 0's. The other ranks build theirs from the same draft."""

    def __init__(
        self, draft: Draft, target: TargetParts, settings: TrainSettings, ranks: ShardedRanks, channel: OrderChannel
    ) -> None:
        self._channel, self._others = channel, range(1, ranks.size)
        self._forgotten: list[str] = []
        head = {HEAD_NAME: draft.head.weight_UD, MAP_NAME: draft.head.vocabulary.offsets_U}
        self._tell(Start(draft.core.geometry, {**draft.core.state_dict(), **head}))
        super().__init__(draft, target, settings, ranks)

    def learn(
        self, requests: Sequence[CapturedRequest], rate_share: float, weight: float = 1.0
    ) -> tuple[float, float, list[float]]:
        shares = deal(requests, 1 + len(self._others))
        forgotten, self._forgotten = tuple(self._forgotten), []
        smallest = min(requests, key=_num_rows)
        for rank in self._others:
            order = Learn(
                tuple(shares[rank]) or (smallest,),
                weight if shares[rank] else 0.0,
                rate_share,
                self.optimiser.rate_scale,
                forgotten,
            )
            self._channel.send(order, rank)
        return super().learn(shares[0], rate_share, weight)

    def set_head(self, head: Head) -> None:
        """Only a head of the target's own rows; raises ValueError for another."""
        if not head.is_target_rows:
            raise ValueError("only a head made of the target's rows can be exchanged while training")
        self._tell(UseHead(head.vocabulary.ids_U))
        super().set_head(head)

    def forget(self, keys: Sequence[str]) -> None:
        self._forgotten += keys
        super().forget(keys)

    def tensors(self) -> dict[str, Tensor]:
        self._tell(Gather())
        return super().tensors()

    def load(self, tensors: dict[str, Tensor]) -> None:
        self._tell(Load(tensors))
        super().load(tensors)

    def candidate(self) -> Draft:
        self._tell(GatherAverage())
        return super().candidate()

    def _tell(self, order: Order) -> None:
        for rank in self._others:
            self._channel.send(order, rank)


def deal(requests: Sequence[CapturedRequest], num_ranks: int) -> list[list[CapturedRequest]]:
    """Each rank's share, much the same number of rows: the longest request first, each to the rank with the fewest rows so far.

    The first rank has one wherever there is one; others may have none.
    """
    shares: list[list[CapturedRequest]] = [[] for _ in range(num_ranks)]
    rows = [0] * num_ranks
    for request in sorted(requests, key=_num_rows, reverse=True):
        rank = rows.index(min(rows))
        shares[rank].append(request)
        rows[rank] += _num_rows(request)
    return shares


def _num_rows(request: CapturedRequest) -> int:
    return request.rows.positions_T.numel()
