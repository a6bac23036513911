"""What an engine answers that is no answer is its failure, and no redirect of its is followed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web
from fake_engine import FakeEngine
from gateway_rig import run, running

from server.errors import EngineRefused


def _answering(engine: FakeEngine, response: Callable[[], web.Response]) -> None:
    """Have an engine answer model requests with that, from its next start on."""

    async def answer(request: web.Request) -> web.Response:
        engine.bodies.append(json.loads(await request.read()))
        return response()

    engine.on_completion = answer  # type: ignore[method-assign]


ODD_ANSWERS: dict[str, Callable[[], web.Response]] = {
    "redirect": lambda: web.Response(status=302, headers={"Location": "/v1/models"}),
    "redirected stream": lambda: web.Response(status=307, headers={"Location": "/", "Content-Type": "text/event-stream"}),
    "empty": lambda: web.Response(status=204),
    "page": lambda: web.Response(text="<html>", content_type="text/html"),
}


@pytest.mark.parametrize("kind", ODD_ANSWERS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_none_is_the_engines_failure(tmp_path: Path, kind: str, stream: bool) -> None:
    async def alone() -> None:
        async with running(tmp_path / "one", before=lambda engines: _answering(engines[0], ODD_ANSWERS[kind])) as rig:
            reply = await rig.complete(stream=stream)
            assert (reply.status, reply.code) == (502, "engine_failed")
            assert "Location" not in reply.headers

    async def beside_a_good_one() -> None:
        before = partial(_first_answers, ODD_ANSWERS[kind])
        async with running(tmp_path / "two", num_engines=2, before=before) as rig:
            assert [(await rig.complete(stream=stream)).status for _ in range(4)] == [200] * 4
            assert rig.engine.bodies, "the other one was asked too"

    run(alone())
    run(beside_a_good_one())


def test_an_engines_private_route_that_redirects_is_not_followed(tmp_path: Path) -> None:
    async def redirect(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": "/paceline/status"})

    def redirecting(engines: list[FakeEngine]) -> None:
        engines[0].on_capture = redirect  # type: ignore[method-assign]

    async def scenario() -> None:
        async with running(tmp_path, before=redirecting) as rig:
            with pytest.raises(EngineRefused, match="HTTP 307"):
                await rig.gateway.fleet.engines[0].client.set_capture(0.5)

    run(scenario())


def _first_answers(response: Callable[[], web.Response], engines: list[FakeEngine]) -> None:
    _answering(engines[0], response)
