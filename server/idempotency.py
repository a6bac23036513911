"""IdempotencyCache: the same key with the same request gets the same answer, the work is done once."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from server.errors import ApiError

MAX_REMEMBERED = 256
_KEY = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Answer:
    """What an HTTP request got."""

    status: int
    body: bytes
    is_final: bool
    """False: a retry may fare better, so it is not remembered."""


class IdempotencyCache:
    """Remembers the newest answers by key."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, tuple[bytes, asyncio.Future[Answer]]] = OrderedDict()

    async def once(self, key: str | None, request: bytes, work: Callable[[], Awaitable[Answer]]) -> Answer:
        """The remembered answer, or that of `work`; raises ApiError (422) where the key belongs to another request."""
        if key is None:
            return await work()
        if not _KEY.fullmatch(key):
            raise ApiError(400, "Idempotency-Key must be 1 to 128 printable ASCII characters", code="bad_header")
        known = self._answers.get(key)
        if known is not None:
            if known[0] != request:
                raise ApiError(
                    422, "this Idempotency-Key was used for another request; use a new one", code="idempotency_key_reused"
                )
            return await asyncio.shield(known[1])
        # A task of its own, so that a caller who leaves does not cancel the work another one waits for.
        future = asyncio.ensure_future(work())
        self._answers[key] = (request, future)
        while len(self._answers) > MAX_REMEMBERED:
            self._answers.popitem(last=False)
        future.add_done_callback(lambda done: self._forget_unless_final(key, done))
        return await asyncio.shield(future)

    def _forget_unless_final(self, key: str, done: asyncio.Future[Answer]) -> None:
        failed = done.cancelled() or done.exception() is not None
        if (failed or not done.result().is_final) and key in self._answers and self._answers[key][1] is done:
            del self._answers[key]
