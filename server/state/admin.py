"""The admin routes of KV as state: where the KV of a prefix is, what each tenant's takes, and what is kept or removed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from server.admin_body import read_struct
from server.disk import Disk
from server.errors import ApiError
from server.public import json_response
from server.state.store import StateObject, StateStore, TenantUsage

MAX_LEASE_S = 30 * 24 * 3600.0
"""What is to stay longer is pinned: a pin is seen and taken back, a lease of years is forgotten."""
_PROMPT_HASH = re.compile(r"[0-9a-f]{32}", re.ASCII)

Answer = TypeVar("Answer")
Item = TypeVar("Item")


class StateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """gateway -> operator: GET /admin/state?prompt_hash=…"""

    prompt_hash: str
    objects: list[StateObject]
    """Empty where nobody has that prefix."""


class UsageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """gateway -> operator: GET /admin/state/usage"""

    tenants: list[TenantUsage]


class StateSelection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """operator -> gateway: POST /admin/state/{pin,unpin,evict}. Names one object; what is left out may be anything."""

    prompt_hash: str
    tenant: str | None = None
    model: str | None = None
    target_version: int | None = None
    layout_hash: str | None = None

    def matches(self, state: StateObject) -> bool:
        """What a back end does not tell of an object excludes nothing."""
        return (
            (self.tenant is None or state.tenant in (None, self.tenant))
            and self.model in (None, state.model)
            and (self.target_version is None or state.target_version in (None, self.target_version))
            and (self.layout_hash is None or state.layout_hash in ("", self.layout_hash))
        )


class LeaseRequest(StateSelection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """operator -> gateway: POST /admin/state/lease"""

    duration_s: Annotated[float, Meta(gt=0.0, le=MAX_LEASE_S)]
    """From now; a lease never shortens an earlier one."""


class EvictAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """gateway -> operator: POST /admin/state/evict"""

    evicted: StateObject
    """As it was."""
    freed_bytes: int
    """Less than it had where longer or held prefixes need some of its blocks."""


def state_routes(stores: Sequence[StateStore]) -> APIRouter:
    """Routes over all back ends of this gateway. A back end whose disk does not answer makes the answer 503, never a part."""
    router = APIRouter()
    back_ends = _BackEnds(stores)

    @router.get("/admin/state")
    async def locate(prompt_hash: str = "") -> Response:
        _check_hash(prompt_hash)
        objects = await back_ends.gather(lambda one: one.locate(prompt_hash))
        return json_response(StateAnswer(prompt_hash=prompt_hash, objects=objects))

    @router.get("/admin/state/usage")
    async def usage() -> Response:
        return json_response(UsageAnswer(tenants=await back_ends.gather(lambda one: one.usage())))

    @router.post("/admin/state/lease")
    async def lease(request: Request) -> Response:
        body = await read_struct(request, LeaseRequest)
        store, state = await back_ends.select(body)
        return json_response(await back_ends.ask(store, lambda: store.lease(state, body.duration_s)))

    @router.post("/admin/state/pin")
    async def pin(request: Request) -> Response:
        store, state = await back_ends.select(await read_struct(request, StateSelection))
        return json_response(await back_ends.ask(store, lambda: store.pin(state)))

    @router.post("/admin/state/unpin")
    async def unpin(request: Request) -> Response:
        store, state = await back_ends.select(await read_struct(request, StateSelection))
        return json_response(await back_ends.ask(store, lambda: store.unpin(state)))

    @router.post("/admin/state/evict")
    async def evict(request: Request) -> Response:
        store, state = await back_ends.select(await read_struct(request, StateSelection))
        num_bytes = await back_ends.ask(store, lambda: store.evict(state))
        return json_response(EvictAnswer(evicted=state, freed_bytes=num_bytes))

    return router


class _BackEnds:
    """Those of one gateway, the first ones asked first."""

    def __init__(self, stores: Sequence[StateStore]) -> None:
        self._stores = stores
        self._disk = Disk()

    async def select(self, selection: StateSelection) -> tuple[StateStore, StateObject]:
        """The one object that is meant, of a back end that can remove it where there is one; raises ApiError."""
        _check_hash(selection.prompt_hash)

        def find(store: StateStore) -> list[tuple[StateStore, StateObject]]:
            return [(store, state) for state in store.locate(selection.prompt_hash) if selection.matches(state)]

        found = await self.gather(find)
        if not found:
            raise ApiError(
                404,
                f"no KV of {selection.prompt_hash} is known, or none that is selected; GET /admin/state?prompt_hash=… tells what is",
                code="state_not_found",
            )
        able = [(store, state) for store, state in found if store.can_remove]
        if len(able) > 1:
            kinds = "; ".join(
                f"tenant {state.tenant}, model {state.model}, target_version {state.target_version}, "
                f"layout_hash {state.layout_hash}"
                for _, state in able
            )
            raise ApiError(409, f"{len(able)} objects have that prefix, say which: {kinds}", code="state_ambiguous")
        return (able or found)[0]

    async def gather(self, ask: Callable[[StateStore], list[Item]]) -> list[Item]:
        """Every back end's answers, in order."""
        answers = [await self.ask(store, partial(ask, store)) for store in self._stores]
        return [item for answer in answers for item in answer]

    async def ask(self, store: StateStore, ask: Callable[[], Answer]) -> Answer:
        """What `ask` returns or raises, and ApiError (503) or DiskStuck where a disk refuses or does not answer.

        Those that read a disk do it off the event loop; the others read what it changes.
        """
        try:
            return await self._disk.do(ask) if store.reads_disk else ask()
        except OSError as error:
            raise ApiError(503, f"a KV store does not answer: {error}", code="state_unavailable", retry_after_s=1) from error


def _check_hash(prompt_hash: str) -> None:
    if not _PROMPT_HASH.fullmatch(prompt_hash):
        raise ApiError(
            400,
            f"prompt_hash is the name of a prefix's last whole block, 32 hex digits, got {prompt_hash[:80]!r}",
            code="bad_prompt_hash",
            param="prompt_hash",
        )
