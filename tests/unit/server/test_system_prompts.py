"""A chat whose client names no domain belongs to that of its system prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gateway_rig import run, running
from msgspec import Raw

from server.domains import SystemPrompts
from server.paths import CHAT_PATH


def chat(system: object, role: str = "system") -> Raw:
    return Raw(json.dumps([{"role": role, "content": system}, {"role": "user", "content": "hi"}]).encode())


def test_a_system_prompt_is_a_domain_once_it_comes_again() -> None:
    prompts = SystemPrompts()
    names = [prompts.domain_of(chat("You write code.")) for _ in range(4)]
    assert names[:2] == [None, None]
    assert names[2] == names[3] != prompts.domain_of(chat("You chat."))
    assert SystemPrompts().domain_of(chat("You write code.")) is None
    others = [SystemPrompts() for _ in range(2)]
    assert {other.domain_of(chat("You write code.")) for other in others for _ in range(3)} == {None, names[2]}


def test_prompts_that_never_come_again_and_too_many_stay_in_the_default_domain() -> None:
    prompts = SystemPrompts()
    assert {prompts.domain_of(chat(f"It is {n} o'clock.")) for n in range(2000)} == {None}
    named = [prompts.domain_of(chat(f"You are number {n}.")) for n in range(40) for _ in range(3)]
    assert len({name for name in named if name}) == 16
    assert len(prompts._counts) <= 1024


@pytest.mark.parametrize(
    "messages",
    [None, Raw(b"[]"), Raw(b"7"), Raw(b"[7]"), Raw(b'[{"role": "system"}]'), Raw(b"[" * 5000), chat("hi", role="user")],
)
def test_what_has_no_system_prompt_names_nothing(messages: Raw | None) -> None:
    prompts = SystemPrompts()
    assert {prompts.domain_of(messages) for _ in range(5)} == {None}


def test_parts_and_developers_count_too() -> None:
    parts = chat([{"type": "text", "text": "You write code."}], role="developer")
    prompts = SystemPrompts()
    assert [prompts.domain_of(parts) for _ in range(3)][2] is not None


def test_the_engine_is_told_and_a_clients_own_name_wins(tmp_path: Path) -> None:
    async def scenario() -> None:
        messages = [{"role": "system", "content": "You write code."}, {"role": "user", "content": "hi"}]

        async with running(tmp_path) as rig:

            async def domain(**headers: str) -> str:
                await rig.request("POST", CHAT_PATH, json={"messages": messages}, headers=headers)
                return str(rig.engine.bodies[-1]["vllm_xargs"]["paceline_domain"])

            assert [await domain() for _ in range(2)] == ["default", "default"]
            assert (await domain()).startswith("system-")
            assert await domain(**{"X-Paceline-Domain": "mine"}) == "mine"

    run(scenario())
