"""Prompts rendered and tokenized in the gateway, against transformers' own rendering of the same models."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Raw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer
from waiting import DEADLINE_S

from server.paths import CHAT_PATH, COMPLETIONS_PATH
from server.routing import tokens
from server.routing.tokens import (
    MAX_BYTES_ON_LOOP,
    MAX_BYTES_PER_TOKEN,
    MAX_THREADS,
    Prompt,
    Prompts,
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RICH = """{{ bos_token }}
{%- macro say(text) %}[{{ text | trim }}]{% endmacro %}
{% if messages[0].role == 'tyrant' %}{{ raise_exception('no tyrants') }}{% endif %}
{% for m in messages %}
    {% if m.role == 'hidden' %}{% continue %}{% endif %}
    {{ m.role | upper }}{{ (' ' + m.name) if m.name is defined else '' }}: {{ say(m.content) }}
    {% if m.role == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}
{% endfor %}
{% if style is defined %}{{ {'style': style, 'é': '<b>'} | tojson }}{% endif %}
{% if enable_thinking is defined %}think={{ enable_thinking }}{% endif %}
{% if add_generation_prompt %}ASSISTANT:{% endif %}"""
PARTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role }}"
    "{% for part in message.content %}{% if part.type == 'text' %}({{ part.text }}){% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def make_target(directory: Path, template: str | None, *, template_file: bool = False) -> Path:
    directory.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*SPECIAL, *alphabet, "he", "hel"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("he", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{SPECIAL[1]} $A", special_tokens=[(SPECIAL[1], 1)])
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.enable_truncation(5)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[1]}
    config["eos_token"] = {"content": SPECIAL[2], "__type": "AddedToken"}
    if template is not None and not template_file:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None and template_file:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def read(target: Path | None, path: str, session: str | None = None, **fields: Any) -> Prompt:
    prompts = Prompts(target, lambda: 0)
    try:
        raw = {name: Raw(msgspec.json.encode(value)) for name, value in fields.items()}
        return asyncio.run(prompts.read(path, raw, session))
    finally:
        prompts.close()


def reference(target: Path, messages: list[dict[str, Any]], **options: Any) -> tuple[int, ...]:
    tokenizer = AutoTokenizer.from_pretrained(str(target))
    text = tokenizer.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **options})
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def random_messages(rng: random.Random) -> list[dict[str, Any]]:
    words = ["hello", "help", " ", "\n", "  x  ", "é", "日本", "<|im_end|>", "<|im_start|>", "{{ 1 }}", "<b>", "🙂", "he", ""]
    messages = [{"role": "system", "content": "be brief"}] if rng.random() < 0.5 else []
    for turn in range(rng.randrange(1, 7)):
        role = ("user", "assistant")[turn % 2]
        messages.append({"role": role, "content": "".join(rng.choice(words) for _ in range(rng.randrange(0, 12)))})
    return messages


@pytest.fixture(scope="module", params=["chatml", "rich", "file"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / request.param
    return make_target(directory, RICH if request.param == "rich" else CHATML, template_file=request.param == "file")


def test_random_conversations_get_the_tokens_transformers_gives_them(target: Path) -> None:
    rng = random.Random(1)
    seen = set()
    for _ in range(60):
        messages = random_messages(rng)
        prompt = read(target, CHAT_PATH, messages=messages)
        assert prompt.token_ids == reference(target, messages)
        seen.add(prompt.token_ids)
    assert len(seen) > 50


def test_a_final_message_can_be_continued(target: Path) -> None:
    for final in ("so far", "so far  ", "hello hello"):
        messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": final}]
        options = {"add_generation_prompt": False, "continue_final_message": True}
        assert read(target, CHAT_PATH, messages=messages, **options).token_ids == reference(target, messages, **options)


def test_a_prompt_can_do_without_the_generation_prompt(target: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    ids = read(target, CHAT_PATH, messages=messages, add_generation_prompt=False).token_ids
    assert ids == reference(target, messages, add_generation_prompt=False)
    assert ids != read(target, CHAT_PATH, messages=messages).token_ids


def test_special_tokens_are_added_where_asked(target: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    plain = read(target, CHAT_PATH, messages=messages).token_ids
    assert plain is not None
    assert read(target, CHAT_PATH, messages=messages, add_special_tokens=True).token_ids == (1, *plain)
    tokenizer = AutoTokenizer.from_pretrained(str(target))
    assert read(target, COMPLETIONS_PATH, prompt="hello you").token_ids == tuple(tokenizer.encode("hello you"))
    bare = tuple(tokenizer.encode("hello you", add_special_tokens=False))
    assert read(target, COMPLETIONS_PATH, prompt=["hello you"], add_special_tokens=False).token_ids == bare


def test_template_arguments_reach_the_template(tmp_path: Path) -> None:
    target = make_target(tmp_path / "m", RICH)
    messages = [{"role": "user", "name": "ann", "content": "hello"}, {"role": "hidden", "content": "x"}]
    ids = read(target, CHAT_PATH, messages=messages, chat_template_kwargs={"style": "<é>", "unused": 1}).token_ids
    assert ids == reference(target, messages, style="<é>")
    ids = read(target, CHAT_PATH, messages=messages, reasoning_effort="none").token_ids
    assert ids == reference(target, messages, enable_thinking=False)
    refused = read(target, CHAT_PATH, messages=[{"role": "tyrant", "content": "kneel"}])
    assert (refused.token_ids, refused.reason) == (None, "template_refused")


def test_text_parts_are_joined_or_handed_on_as_the_template_wants_them(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "hello"}, "and", {"type": "input_text", "text": "you"}]
    as_text = make_target(tmp_path / "text", CHATML)
    joined = [{"role": "user", "content": "hello\nand\nyou"}]
    assert read(as_text, CHAT_PATH, messages=[{"role": "user", "content": parts}]).token_ids == reference(as_text, joined)
    with_empty = [{"role": "user", "content": [{"type": "text", "text": ""}, *parts]}]
    assert read(as_text, CHAT_PATH, messages=with_empty).token_ids == reference(as_text, joined)
    as_parts = make_target(tmp_path / "parts", PARTS)
    wrapped = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("hello", "and", "you")]}]
    assert read(as_parts, CHAT_PATH, messages=[{"role": "user", "content": parts}]).token_ids == reference(as_parts, wrapped)
    single = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert read(as_parts, CHAT_PATH, messages=[{"role": "user", "content": "hello"}]).token_ids == reference(as_parts, single)


def test_developers_are_systems_to_a_template_that_does_not_know_them(target: Path) -> None:
    given = [
        {"role": "user", "content": "hello"},
        {"role": "developer", "content": "be kind"},
        {"role": "system", "content": "be brief"},
    ]
    merged = [{"role": "system", "content": "be kind\n\nbe brief"}, {"role": "user", "content": "hello"}]
    assert read(target, CHAT_PATH, messages=given).token_ids == reference(target, merged)


def test_token_ids_pass_through(target: Path) -> None:
    assert read(target, COMPLETIONS_PATH, prompt=[5, 6, 7]).token_ids == (5, 6, 7)
    assert read(target, COMPLETIONS_PATH, prompt=[[5, 6, 7]]).token_ids == (5, 6, 7)
    assert read(None, COMPLETIONS_PATH, prompt=[5, 6, 7]).token_ids == (5, 6, 7)


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (COMPLETIONS_PATH, {"prompt": ["a", "b"]}, "several_prompts"),
        (COMPLETIONS_PATH, {"prompt": [[1], [2]]}, "several_prompts"),
        (COMPLETIONS_PATH, {"prompt": [1, -1]}, "unreadable"),
        (COMPLETIONS_PATH, {"prompt": [1, 2**40]}, "unreadable"),
        (COMPLETIONS_PATH, {"prompt": [1, True]}, "unreadable"),
        (COMPLETIONS_PATH, {"prompt": []}, "unreadable"),
        (COMPLETIONS_PATH, {}, "unreadable"),
        (COMPLETIONS_PATH, {"prompt": "a", "prompt_logprobs": 0}, "cache_not_read"),
        (COMPLETIONS_PATH, {"prompt": "a", "truncate_prompt_tokens": 5}, "unsupported_field"),
        (COMPLETIONS_PATH, {"prompt": "a", "add_special_tokens": "yes"}, "unsupported_field"),
        (CHAT_PATH, {"messages": []}, "unreadable"),
        (CHAT_PATH, {"messages": "hello"}, "unreadable"),
        (CHAT_PATH, {"messages": [7]}, "not_text"),
        (
            CHAT_PATH,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "not_text",
        ),
        (CHAT_PATH, {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}, "tools"),
        (CHAT_PATH, {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "not_text"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "unsupported_field"),
        (
            CHAT_PATH,
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tokenize": True}},
            "unsupported_field",
        ),
        ("/v1/embeddings", {"prompt": "a"}, "other_route"),
    ],
)
def test_what_cannot_be_known_here_is_left_open_with_a_reason(
    path: str, fields: dict[str, Any], reason: str, target: Path
) -> None:
    prompt = read(target, path, **fields)
    assert (prompt.token_ids, prompt.reason) == (None, reason)


def test_odd_bytes_never_fail(target: Path) -> None:
    prompts = Prompts(target, lambda: 0)
    for body in (b'"\\ud800"', b"[" * 5000, b"{", b"nul"):
        prompt = asyncio.run(prompts.read(COMPLETIONS_PATH, {"prompt": Raw(body)}))
        assert (prompt.token_ids, prompt.reason) == (None, "unreadable")
    prompts.close()


@pytest.mark.parametrize("depth", [200, 330, 500, 900])
def test_nesting_that_only_copies_do_not_bear_never_fails(depth: int, target: Path) -> None:
    nested = "[" * depth + "]" * depth
    messages = f'[{{"role": "assistant", "content": "a", "reasoning": {nested}}}]'
    fields = {"messages": Raw(messages.encode()), "continue_final_message": Raw(b"true")}
    prompts = Prompts(target, lambda: 0)
    assert asyncio.run(prompts.read(CHAT_PATH, fields)).reason in ("", "unreadable")
    prompts.close()


def test_without_a_tokenizer_or_template_only_salt_and_session_are_known(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}]
    absent = read(None, CHAT_PATH, messages=messages, cache_salt="s")
    assert (absent.token_ids, absent.salt, absent.reason) == (None, "s", "no_template")
    assert absent.session
    assert read(None, COMPLETIONS_PATH, prompt="a").reason == "no_tokenizer"
    bare = make_target(tmp_path / "bare", None)
    assert read(bare, CHAT_PATH, messages=messages).reason == "no_template"
    assert read(bare, COMPLETIONS_PATH, prompt="a").token_ids is not None


def test_turns_of_one_conversation_share_a_session_and_others_do_not(target: Path) -> None:
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]
    later = [*first, {"role": "assistant", "content": "x"}, {"role": "user", "content": "two"}]
    other = [first[0], {"role": "user", "content": "three"}]
    session = read(target, CHAT_PATH, messages=first).session
    assert session
    assert read(target, CHAT_PATH, messages=later).session == session
    assert read(target, CHAT_PATH, messages=other).session != session
    assert read(target, CHAT_PATH, "named", messages=first).session == "named"
    long = "".join(str(number) for number in range(200))
    assert read(target, COMPLETIONS_PATH, prompt=long).session == read(target, COMPLETIONS_PATH, prompt=long + "!").session


@pytest.mark.rig
def test_the_event_loop_goes_on_while_a_long_prompt_is_read(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_WAIT_S", 60.0)

    async def longest_pause() -> tuple[float, int]:
        prompts = Prompts(target, lambda: 0)
        body = {"prompt": Raw(msgspec.json.encode("hello you " * 200_000))}
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(prompts.read(COMPLETIONS_PATH, body))
        num_turns, started = 0, loop.time()
        while not task.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        prompts.close()
        assert (await task).token_ids is not None
        return loop.time() - started, num_turns

    duration_s, num_turns = asyncio.run(longest_pause())
    # Without a thread the loop would get no turn between the first and the last.
    assert num_turns > 5, f"{num_turns} turns of the loop in {duration_s:.2f} s"


def test_a_prompt_no_engine_takes_is_not_tokenized(target: Path) -> None:
    prompts = Prompts(target, lambda: 10)

    def read_completion(text: str) -> Prompt:
        return asyncio.run(prompts.read(COMPLETIONS_PATH, {"prompt": Raw(msgspec.json.encode(text))}, "mine"))

    longest = "a" * (10 * MAX_BYTES_PER_TOKEN - len('""'))
    assert read_completion(longest).token_ids is not None
    refused = read_completion(longest + "a")
    assert (refused.token_ids, refused.session, refused.reason) == (None, "mine", "too_long")
    prompts.close()


@pytest.mark.rig
def test_nobody_waits_long_for_the_long_prompts_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_WAIT_S", 0.05)
    target = make_target(tmp_path / "m", CHATML)

    async def ask_beside_long_prompts() -> tuple[Prompt, Prompt, float, Prompt]:
        prompts = Prompts(target, lambda: 0)
        long = {"prompt": Raw(msgspec.json.encode("hello you " * 150_000))}
        medium = {"prompt": Raw(msgspec.json.encode("hello " * (MAX_BYTES_ON_LOOP // 5)))}
        short = {"prompt": Raw(b'"hello"')}
        others = [asyncio.create_task(prompts.read(COMPLETIONS_PATH, long)) for _ in range(2 * MAX_THREADS)]
        await asyncio.sleep(0)
        at_once = await prompts.read(COMPLETIONS_PATH, short)
        started_s = time.monotonic()
        beside = await prompts.read(COMPLETIONS_PATH, medium)
        waited_s = time.monotonic() - started_s
        assert {prompt.reason for prompt in await asyncio.gather(*others)} == {"slow"}
        deadline_s = time.monotonic() + DEADLINE_S
        while (later := await prompts.read(COMPLETIONS_PATH, medium)).token_ids is None and time.monotonic() < deadline_s:
            pass
        busy_s = time.monotonic() - started_s
        prompts.close()
        return at_once, beside, waited_s / busy_s, later

    at_once, beside, share, later = asyncio.run(ask_beside_long_prompts())
    assert at_once.token_ids is not None
    assert (beside.token_ids, beside.reason) == (None, "slow")
    assert share < 0.5, "the threads were busy for far longer"
    assert later.token_ids is not None


def test_a_prompt_is_read_alike_on_the_event_loop_and_in_a_thread(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_WAIT_S", 60.0)
    fields = {
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hello you \u00e9\u4e16 <|im_end|>"}],
        "cache_salt": "mine",
    }
    on_loop = read(target, CHAT_PATH, **fields)
    monkeypatch.setattr(tokens, "MAX_BYTES_ON_LOOP", 0)
    assert on_loop.token_ids
    assert read(target, CHAT_PATH, **fields) == on_loop
