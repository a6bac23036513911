"""The other ranks of a learner with several processes: a trainer, and the leading rank's orders, one after the other."""

from __future__ import annotations

import logging

from drafter.draft import draft_from_tensors
from drafter.head import Head
from drafter.target import TargetParts
from drafter.vocabulary import DraftVocabulary
from learner.config import TrainSettings
from learner.orders import Gather, GatherAverage, Learn, Load, Order, OrderChannel, Start, Stop, UseHead
from learner.sharded import ShardedRanks
from learner.trainer import Trainer

log = logging.getLogger(__name__)


def follow(target: TargetParts, settings: TrainSettings, ranks: ShardedRanks, channel: OrderChannel) -> None:
    """Do what is ordered until there is a Stop; raises RuntimeError where the leading rank is gone.

    A step or a load that fails fails on the leading rank too, which knows what to do next.
    """
    start = channel.receive()
    if not isinstance(start, Start):
        return
    draft = draft_from_tensors(start.tensors, start.geometry, target, who="the leading rank's draft")
    trainer = Trainer(draft, target, settings, ranks)
    while not isinstance(order := channel.receive(), Stop):
        try:
            _carry_out(order, trainer, target)
        except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
            log.warning("%s failed: %s: %s", type(order).__name__, type(error).__name__, error)


def _carry_out(order: Order, trainer: Trainer, target: TargetParts) -> None:
    match order:
        case Learn():
            trainer.forget(order.forgotten)
            trainer.optimiser.rate_scale = order.rate_scale
            trainer.learn(order.requests, order.rate_share, order.weight)
        case UseHead():
            trainer.set_head(Head.of_target(DraftVocabulary(order.ids_U, target.head_VD.shape[0]), target.head_VD))
        case Load():
            trainer.load(order.tensors)
        case Gather():
            trainer.tensors()
        case GatherAverage():
            trainer.candidate()
        case _:
            raise ValueError(f"a {type(order).__name__} in mid-training")
