"""The admin routes of KV as state: where the KV of a prefix is, and what each tenant's takes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from fastapi import APIRouter, Response

from server.errors import ApiError
from server.public import json_response
from server.state.store import StateObject, StateStore, TenantUsage

_PROMPT_HASH = re.compile(r"[0-9a-f]{32}", re.ASCII)

Item = TypeVar("Item")


class StateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """gateway -> operator: GET /admin/state?prompt_hash=…"""

    prompt_hash: str
    objects: list[StateObject]
    """Empty where nobody has that prefix."""


class UsageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """gateway -> operator: GET /admin/state/usage"""

    tenants: list[TenantUsage]


def state_routes(stores: Sequence[StateStore]) -> APIRouter:
    """Routes over all back ends of this gateway. A back end whose disk does not answer makes the answer 503, never a part."""
    router = APIRouter()

    @router.get("/admin/state")
    async def locate(prompt_hash: str = "") -> Response:
        if not _PROMPT_HASH.fullmatch(prompt_hash):
            raise ApiError(
                400,
                f"prompt_hash is the name of a prefix's last whole block, 32 hex digits, got {prompt_hash[:80]!r}",
                code="bad_prompt_hash",
                param="prompt_hash",
            )
        return json_response(
            StateAnswer(prompt_hash=prompt_hash, objects=await _gather(stores, lambda one: one.locate(prompt_hash)))
        )

    @router.get("/admin/state/usage")
    async def usage() -> Response:
        return json_response(UsageAnswer(tenants=await _gather(stores, lambda one: one.usage())))

    return router


async def _gather(stores: Sequence[StateStore], ask: Callable[[StateStore], list[Item]]) -> list[Item]:
    """Every back end's answers, in order. Those that read a disk do it off the event loop; the others read what it changes."""
    try:
        answers = [await asyncio.to_thread(ask, store) if store.reads_disk else ask(store) for store in stores]
    except OSError as error:
        raise ApiError(503, f"a KV store does not answer: {error}", code="state_unavailable", retry_after_s=1) from error
    return [item for answer in answers for item in answer]
