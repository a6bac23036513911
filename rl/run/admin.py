"""The gateway's admin port, as a run uses it: which version of the target is active, and the wish for another."""

from __future__ import annotations

from typing import TypeVar

import aiohttp
import msgspec
from msgspec import Struct

from wire.errors import PacelineError
from wire.target_control import ActivateTargetRequest, TargetList, TargetSwapReport

_TIMEOUT_S = 10.0
_CHANGE_TIMEOUT_S = 600.0
"""For a change of the target; its own deadline is the gateway's."""

Answer = TypeVar("Answer", bound=Struct)


class AdminSilent(PacelineError):
    """Nobody answered, or nothing that can be read: it may or may not have been done."""

    code = "admin_silent"


class AdminRefused(PacelineError):
    """The gateway says no. `code` is its own word for why."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class _Problem(Struct, frozen=True):
    message: str = ""
    code: str = ""


class _Refusal(Struct, frozen=True):
    error: _Problem = _Problem()


class Admin:
    """One HTTP session; `close` ends it. token: the operator's."""

    def __init__(self, base_url: str, token: str) -> None:
        self._base_url = base_url.rstrip("/")
        self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"})

    async def close(self) -> None:
        await self._session.close()

    async def targets(self) -> TargetList:
        """Raises AdminSilent or AdminRefused, as all here do."""
        return await self._call("GET", "/admin/targets", TargetList)

    async def activate(self, version: int, request: ActivateTargetRequest, *, key: str) -> TargetSwapReport:
        """The same key asks for the same change, however often it is sent, and a refusal for good is given again under it."""
        return await self._call(
            "POST",
            f"/admin/targets/{version}/activate",
            TargetSwapReport,
            body=msgspec.json.encode(request),
            key=key,
            timeout_s=_CHANGE_TIMEOUT_S,
        )

    async def _call(
        self, method: str, path: str, kind: type[Answer], *, body: bytes = b"", key: str = "", timeout_s: float = _TIMEOUT_S
    ) -> Answer:
        headers = {"Content-Type": "application/json"} | ({"Idempotency-Key": key} if key else {})
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, self._base_url + path, data=body or None, headers=headers, timeout=timeout
            ) as response:
                answer = await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise AdminSilent(
                f"the admin port at {self._base_url} does not answer: {type(error).__name__}: {error}; is the system up?"
            ) from error
        if status != 200:
            raise _refusal(status, answer)
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            raise AdminSilent(f"what {path} answers is no {kind.__name__}: {error}") from error


def _refusal(status: int, answer: bytes) -> AdminRefused:
    try:
        problem = msgspec.json.decode(answer, type=_Refusal).error
    except msgspec.DecodeError:
        problem = _Problem(message=answer[:200].decode(errors="replace"))
    return AdminRefused(status, problem.code or str(status), problem.message or f"status {status}")
