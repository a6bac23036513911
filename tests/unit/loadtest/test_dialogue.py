"""What a user says in a conversation, when they pause and when they leave."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.conversations import FOLLOW_UPS
from loadtest.run.dialogue import Dialogue
from loadtest.scenario import Lane, Poisson
from loadtest.traffic import Prompt


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


PROMPT = Prompt("p", (message("system", "s"), message("user", "u0"), message("assistant", "old"), message("user", "u1")))


def lane(**more: Any) -> Lane:
    phase = {"name": "p", "duration_s": 1, "arrivals": Poisson(rate_per_s=1), "traffic": {"a": 1}}
    return Lane.build({"name": "l", "phase": [phase], **more}, source="test")


def dialogue(index: int = 0, **more: Any) -> Dialogue:
    return Dialogue(lane(**more), PROMPT, seed=0, index=index)


def test_a_single_request_is_the_whole_prompt() -> None:
    assert dialogue().num_turns == 1
    assert dialogue().prompt() == PROMPT


def test_a_conversation_takes_the_users_turns_with_real_answers_and_then_follows_up() -> None:
    talk = dialogue(turns={"number": 4})
    asked = [talk.prompt()]
    for answer in ("a0", "a1", "a2"):
        talk.answered(answer)
        asked.append(talk.prompt())
    assert asked[0].messages == (message("system", "s"), message("user", "u0"))
    assert asked[1].messages == (*asked[0].messages, message("assistant", "a0"), message("user", "u1"))
    assert asked[2].messages[-2:] == (message("assistant", "a1"), message("user", FOLLOW_UPS[0]))
    assert asked[3].messages[-1] == message("user", FOLLOW_UPS[1])


def test_a_conversation_goes_on_with_the_recorded_users_later_questions() -> None:
    recorded = Prompt("p", (message("user", "u0"),), ("u1", "u2"))
    assert Dialogue(lane(), recorded, seed=0, index=0).prompt().messages == (message("user", "u0"),)
    talk = Dialogue(lane(turns={"number": 4}), recorded, seed=0, index=0)
    for answer in ("a0", "a1", "a2"):
        talk.answered(answer)
    asked = [one["content"] for one in talk.prompt().messages if one["role"] == "user"]
    assert asked == ["u0", "u1", "u2", FOLLOW_UPS[0]]


def test_pauses_and_departures_are_drawn_and_the_same_each_time() -> None:
    options = {"turns": {"number": 3, "mean_think_time_s": 2.0}, "cancel": {"share": 0.25, "mean_after_s": 5.0}}
    pauses = [dialogue(index, **options).think_time_s() for index in range(2000)]
    leaves = [dialogue(index, **options).leaves_after_s() for index in range(2000)]
    leaving = [after_s for after_s in leaves if after_s is not None]
    assert sum(pauses) / len(pauses) == pytest.approx(2.0, rel=0.1)
    assert len(leaving) == pytest.approx(500, rel=0.15)
    assert sum(leaving) / len(leaving) == pytest.approx(5.0, rel=0.15)
    assert leaves == [dialogue(index, **options).leaves_after_s() for index in range(2000)]
    assert dialogue().think_time_s() == 0
    assert dialogue().leaves_after_s() is None
