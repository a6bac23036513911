"""Routes that call any method of the workers or of the engine core, for engines under test only."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import State


class RpcPlugin:
    name = "engine_test_rpc"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        @app.post("/test/rpc")
        async def rpc(request: Request) -> Any:
            body = await request.json()
            return await app.state.engine_test_client.collective_rpc(body["method"], args=tuple(body["args"]))

        @app.post("/test/core")
        async def core(request: Request) -> Any:
            body = await request.json()
            return await app.state.engine_test_client.engine_core.call_utility_async(body["method"], *body["args"])

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        state.engine_test_client = engine_client
