"""What leaves an environment is checked where it is made, and survives the channel."""

from __future__ import annotations

import msgspec
import pytest

from rl.environments.frames import FromWorker, Reply, ResetCall, StepCall, ToWorker
from rl.environments.interface import (
    Action,
    Chat,
    ChatMessage,
    Excluded,
    Observation,
    Problem,
    Scored,
    Step,
    Text,
    Tokens,
)
from rl.trajectory import RewardPart


@pytest.mark.parametrize("value", [-0.01, 1.01, float("nan"), float("inf")])
def test_a_reward_outside_its_range_is_an_error(value: float) -> None:
    with pytest.raises(ValueError, match=r"outside|finite"):
        Scored((RewardPart("correct", value),))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_is_no_less_than_zero(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        Scored((RewardPart("correct", 1.0, weight),))


def test_the_reward_is_the_weighted_sum_of_its_parts() -> None:
    assert Scored((RewardPart("a", 1.0, 0.75), RewardPart("b", 0.5, 0.25), RewardPart("watched", 1.0, 0.0))).reward == 0.875
    with pytest.raises(ValueError, match="at least one"):
        Scored(())


def test_a_step_is_done_exactly_when_it_observes_nothing() -> None:
    with pytest.raises(ValueError, match="done"):
        Step(None)
    with pytest.raises(ValueError, match="done"):
        Step(Text("more"), is_done=True)


def test_a_turn_that_no_channel_can_carry_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValueError, match="no Unicode"):
        Action("half a pair: \ud83d")
    assert Action("whole: \U0001f600").text


def test_a_seed_is_not_negative() -> None:
    with pytest.raises(ValueError, match="seed"):
        Problem("addition", -1)


@pytest.mark.parametrize(
    "observation", [Chat((ChatMessage("user", "hi"), ChatMessage("tool", "5"))), Text("a ->"), Tokens((1, 2))]
)
def test_messages_come_back_as_they_went(observation: Observation) -> None:
    for result in (
        Step(observation, info={"place": 3, "is_lit": True, "name": "x"}),
        Scored((RewardPart("correct", 1.0),), info={"answer": "7"}),
        Excluded("crashed", "why"),
    ):
        reply = Reply(4, result)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=FromWorker) == reply
    for call in (ResetCall(1, Problem("addition", 3, "heldout"), 9), StepCall(1, Action("7", (1, 2), is_truncated=True), 9)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=ToWorker) == call


def test_a_reward_outside_its_range_is_refused_on_the_channel_as_well() -> None:
    forged = msgspec.msgpack.encode(
        {"type": "reply", "call_id": 1, "result": {"type": "scored", "parts": [{"name": "correct", "value": 7.0}]}}
    )
    with pytest.raises(msgspec.ValidationError, match="outside"):
        msgspec.msgpack.decode(forged, type=FromWorker)
