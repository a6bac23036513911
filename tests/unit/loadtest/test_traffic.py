from __future__ import annotations

import gzip
import importlib.util
import types
from pathlib import Path

import pytest

from loadtest.sources.human_eval import human_eval_prompts, load
from loadtest.traffic import Prompt, TrafficError, by_id, by_opening, is_held_out, split

PROBLEM = '{"task_id": "a", "prompt": "def f():"}'


def asked(prompt_id: str, *turns: tuple[str, str]) -> Prompt:
    return Prompt(prompt_id, tuple({"role": role, "content": content} for role, content in turns))


def test_the_split_is_the_same_everywhere() -> None:
    assert [index for index in range(20) if is_held_out(f"HumanEval/{index}")] == [1, 2, 5, 7, 17]


def test_the_split_takes_about_its_share_and_keeps_every_prompt_once() -> None:
    source = split((Prompt(str(index), ()) for index in range(2000)), about=by_id)
    assert len(source.heldout) + len(source.train) == 2000
    assert 0.17 < len(source.heldout) / 2000 < 0.23
    assert not {prompt.id for prompt in source.heldout} & {prompt.id for prompt in source.train}


def test_chats_with_one_opening_lie_on_one_side() -> None:
    for opening in map(str, range(30)):
        short = asked("one", ("system", "x"), ("user", opening))
        long = asked("two", ("user", opening), ("assistant", "yes"), ("user", "and then?"))
        source = split([short, long], about=by_opening)
        assert sorted([len(source.train), len(source.heldout)]) == [0, 2]


def test_what_is_broken_is_counted() -> None:
    source = split([None, asked("a", ("user", "x")), None], about=by_opening)
    assert (len(source.train) + len(source.heldout), source.num_broken) == (1, 2)


def test_reading_stops_where_a_source_is_large_enough() -> None:
    read = []

    def endless() -> object:
        while True:
            read.append(1)
            yield Prompt(str(len(read)), ({"role": "user", "content": "x" * 60},), ("y" * 40,))

    source = split(endless(), about=by_id, max_characters=1050)
    assert (len(source.train) + len(source.heldout), len(read)) == (10, 11)


def test_broken_lines_are_passed_over() -> None:
    lines = [PROBLEM, "", "[" * 100_000, "not json", "[1]", '{"task_id": "b"}', '{"task_id": "c", "prompt": "x"']
    assert [prompt and prompt.id for prompt in human_eval_prompts(lines)] == ["a", *[None] * 6]


def test_a_prompt_is_a_chat_that_shows_the_code() -> None:
    (prompt,) = human_eval_prompts([PROBLEM])
    assert prompt is not None
    assert [message["role"] for message in prompt.messages] == ["user"]
    assert "```python\ndef f():```" in prompt.messages[0]["content"]


def test_the_package_holds_all_problems() -> None:
    source = load()
    assert (len(source.train) + len(source.heldout), source.num_broken) == (164, 0)
    assert len(source.heldout) >= 20


def package_at(directory: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """A package human_eval whose file has that content."""
    (directory / "data").mkdir()
    (directory / "data" / "HumanEval.jsonl.gz").write_bytes(content)
    spec = types.SimpleNamespace(origin=str(directory / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)


def test_of_a_cut_file_the_first_problems_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(f'{{"task_id": "HumanEval/{index}", "prompt": "{index * 7919}"}}\n' for index in range(20_000))
    whole = gzip.compress(lines.encode())
    package_at(tmp_path, monkeypatch, whole[: len(whole) // 2])
    source = load()
    assert 1_000 < len(source.train) + len(source.heldout) < 20_000
    assert source.num_broken == 1


def test_a_file_without_problems_is_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package_at(tmp_path, monkeypatch, b"no gzip at all")
    with pytest.raises(TrafficError, match="holds no usable problem"):
        load()


def test_an_absent_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(TrafficError, match="pip install"):
        load()


def test_half_a_character_is_broken_wherever_it_stands() -> None:
    half = "\ud800"
    bad = [asked(half, ("user", "x")), asked("a", ("user", half)), Prompt("b", ({"role": "user", "content": "x"},), (half,))]
    source = split([*bad, asked("c", ("user", "x"))], about=by_opening)
    assert ([one.id for one in source.train + source.heldout], source.num_broken) == (["c"], 3)


def test_reading_stops_where_prompts_are_many_and_short() -> None:
    source = split((Prompt(str(index), ({"role": "user", "content": "x"},)) for index in range(50)), about=by_id, max_prompts=7)
    assert len(source.train) + len(source.heldout) == 7
