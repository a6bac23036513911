"""What a client may not ask for in a body."""

from __future__ import annotations

from pathlib import Path

import pytest
from gateway_rig import run, running

from server.body import prepare_body
from server.domains import SystemPrompts
from server.errors import ApiError
from server.identity import read_identity
from server.relay.exchange import FULL_REPORT, with_xargs


@pytest.mark.parametrize("field", ['"prompt":%s', '"prompt_embeds":%s', '"vllm_xargs":{"a":%s}', '"n":%s', '"priority":%s'])
def test_a_body_nested_too_deeply_is_the_clients_fault(field: str) -> None:
    identity = read_identity([], "r")
    refused = set()
    # Somewhere between these is what one reader just takes and the next one, called from deeper down, does not.
    for depth in range(700, 1000):
        body = "{" + field % ("[" * depth + "]" * depth) + "}"
        try:
            fields = prepare_body(body.encode(), identity, SystemPrompts(), max_choices=1)
            with_xargs(fields, FULL_REPORT)
        except ApiError as error:
            refused.add((error.status, error.code))
    assert (400, "invalid_json") in refused
    assert {status for status, _ in refused} == {400}


@pytest.mark.parametrize("priority", [-1, -(2**63), "-1", -1.0, True, [0], -(2**70)])
def test_nobody_goes_before_other_users(tmp_path: Path, priority: object) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            reply = await rig.complete(priority=priority)
            assert (reply.status, reply.code) == (400, "bad_priority")
            for allowed in (0, 5, None):
                assert (await rig.complete(priority=allowed)).status == 200
            assert [body["priority"] for body in rig.engine.bodies] == [0, 5, None]

    run(scenario())
