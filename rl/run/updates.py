"""A version of the target becomes what all engines serve: asked for with the version that should be active until then.

What passes by itself (another swap, an engine that is coming back, a gateway that starts anew) is waited for; a refusal that would come
again ends the run with its reason. An answer that was lost is looked up, so that no change is taken for one that did not happen.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

from rl.run.admin import Admin, AdminRefused, AdminSilent
from wire.errors import PacelineError, StaleExpectation
from wire.target_control import ActivateTargetRequest, TargetSwapReport

log = logging.getLogger(__name__)

PATIENCE_S = 900.0
"""For what passes by itself: an engine that was killed compiles for minutes."""
MAX_FAILURES = 3
"""Changes that began and were taken back."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.2, 5.0
_FAILURE_PAUSE_S = 3.0
"""At least, after a change that failed: by then the gateway has found out that an engine is dead, and says so."""
_PASSING = {"swap_in_progress", "no_engine_ready", "server_stopping", "swap_refused"}
"""The gateway's codes for what is no fault of the version; `swap_refused`: an engine that is away holds KV for others."""


class UpdateFailed(PacelineError):
    """A version of the target cannot be made the active one."""

    code = "target_update_failed"


class Updates:
    def __init__(self, admin: Admin, *, patience_s: float = PATIENCE_S) -> None:
        self._admin = admin
        self._patience_s = patience_s

    async def activate(self, version: int, *, expected_active: int, reason: str) -> TargetSwapReport | None:
        """Returns the gateway's report; None where the version is active and the answer that said so was lost. Raises UpdateFailed."""
        request = ActivateTargetRequest(expected_active=expected_active, reason=reason)
        key, loop = _new_key(), asyncio.get_running_loop()
        give_up_s, pause_s, num_failures = loop.time() + self._patience_s, _FIRST_PAUSE_S, 0
        while True:
            try:
                return await self._admin.activate(version, request, key=key)
            except AdminSilent as error:
                problem: PacelineError = error
            except AdminRefused as error:
                problem = error
                key = _new_key()  # under the old one the gateway would only repeat this answer
                if error.code == StaleExpectation.code:
                    active = await self._active()
                    if active == version:
                        return None
                    if active is not None:
                        raise UpdateFailed(
                            f"target {version} is not activated: {error}; somebody else changed the target, end that and start the run again"
                        ) from error
                elif error.code not in _PASSING:
                    num_failures += 1
                    may_come_about = error.status >= 500 or error.code == "commit_failed"
                    if not may_come_about or num_failures == MAX_FAILURES:
                        raise UpdateFailed(f"target {version} is refused ({error.code}): {error}") from error
                    pause_s = max(pause_s, _FAILURE_PAUSE_S)
            if loop.time() > give_up_s:
                raise UpdateFailed(
                    f"target {version} could not be activated for {self._patience_s:.0f} s: {problem}"
                ) from problem
            log.warning("target %d is not active yet, trying again: %s", version, problem)
            await asyncio.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _LAST_PAUSE_S)

    async def require(self, version: int) -> int:
        """Have the engines serve a version, whatever they serve now; returns what they served. Raises UpdateFailed, AdminSilent."""
        active = (await self._admin.targets()).active_version
        if active != version:
            await self.activate(version, expected_active=active, reason="an RL run goes on from it")
        return active

    async def _active(self) -> int | None:
        """None where nobody can tell."""
        try:
            return (await self._admin.targets()).active_version
        except (AdminSilent, AdminRefused):
            return None


def _new_key() -> str:
    return uuid.uuid4().hex
