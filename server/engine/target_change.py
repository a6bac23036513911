"""TargetChange: puts another version of the target under a running engine, as a transaction.

Requests are frozen, not ended, and every bit of KV is dropped, so that what goes on is computed anew by the weights it goes on
with. Between pause and resume no step runs: a label of vLLM's never names weights that did not draw the token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from vllm.v1.engine.exceptions import EngineDeadError

from wire.errors import EngineError, SwapError
from wire.target import BASE_VERSION
from wire.target_control import TargetCommitReport, TargetCommitRequest

logger = logging.getLogger(__name__)

_PAUSE_RETRY_S = 0.2
"""KV that waits for another engine cannot be dropped: those requests run on until it is there, then the pause is tried again."""

Answers = list[dict[str, Any]]


class TargetRefused(SwapError):
    """The engine computes with the version it computed with before."""

    code = "target_refused"


class Core(Protocol):
    """What is asked of vLLM's engine client."""

    async def pause_generation(self, *, mode: Any, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...

    async def update_weight_version(self, new_version: str) -> None: ...


class TargetChange:
    """One per engine; its owner calls it one at a time."""

    def __init__(
        self,
        core: Core,
        *,
        ask: Callable[..., Awaitable[Answers]],
        unless_dead: Callable[[Awaitable[None]], Awaitable[None]],
    ) -> None:
        """`ask(method, *args)` calls every worker; `unless_dead` waits for an answer of the core while that lives."""
        self._core = core
        self._ask = ask
        self._unless_dead = unless_dead

    async def label_base(self) -> None:
        """Tokens of an engine that was just started are version 0's."""
        await self._unless_dead(self._core.update_weight_version(str(BASE_VERSION)))

    async def commit(self, request: TargetCommitRequest) -> tuple[TargetCommitReport | None, Answers]:
        """The report, or None and the workers' answers where they refused.

        Raises TargetRefused where the version before is in force again, EngineError where the engine ends.
        """
        started_s = time.perf_counter()
        deadline_s = asyncio.get_running_loop().time() + request.deadline_s
        await self._pause(request.version, deadline_s)
        try:
            paused_s = time.perf_counter()
            answers, digest = await self._apply(request, deadline_s)
        except (TargetRefused, EngineError, EngineDeadError):
            raise
        except Exception as error:
            # As which vLLM answers whatever a worker raised. With what each of them computes now nobody can tell.
            logger.critical("target %d was half committed, this engine ends: %s", request.version, error)
            await self._ask("paceline_give_up")
            raise EngineError(
                f"target {request.version} was half committed ({error}); the engine ends and starts anew"
            ) from error
        finally:
            await self._unless_dead(self._core.resume_generation())
        if any("error" in answer for answer in answers):
            return None, answers
        report = TargetCommitReport(
            version=request.version,
            previous=request.expected_active,
            weights_sha256=answers[0]["sha256"],
            digest=digest,
            pause_ms=(paused_s - started_s) * 1e3,
            apply_ms=max(answer["apply_ms"] for answer in answers),
            total_ms=(time.perf_counter() - started_s) * 1e3,
        )
        return report, answers

    async def _pause(self, version: int, deadline_s: float) -> None:
        """Freeze all requests and drop all KV; raises TargetRefused with everything running again."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout_at(deadline_s):
                    return await self._unless_dead(self._core.pause_generation(mode="keep", clear_cache=True))
            except (EngineError, EngineDeadError):
                raise
            except TimeoutError:
                problem = "the engine did not pause in time"
            except Exception as error:  # noqa: BLE001 -- as which vLLM answers whatever a utility raised
                problem = f"its KV could not be dropped: {error}"
            await self._unless_dead(self._core.resume_generation())
            if loop.time() + _PAUSE_RETRY_S >= deadline_s:
                raise TargetRefused(f"target {version} was not committed, {problem}; try again with a longer deadline")
            await asyncio.sleep(_PAUSE_RETRY_S)

    async def _apply(self, request: TargetCommitRequest, deadline_s: float) -> tuple[Answers, str]:
        """The workers' answers and the digest; all workers changed, or none."""
        answers = await self._ask("paceline_commit_target", request.version, request.expected_active)
        took = [answer for answer in answers if "error" not in answer]
        problem = ""
        digest = ""
        if len(took) == len(answers):
            if len({answer["sha256"] for answer in answers}) > 1:
                problem = "its workers read different files"
            else:
                digests = await self._ask("paceline_target_digest")
                digest = "+".join(str(answer["digest"]) for answer in digests)
                problem = await self._label(request.version)
                if not problem and asyncio.get_running_loop().time() > deadline_s:
                    problem = f"it took longer than {request.deadline_s:g} s"
            if not problem:
                return answers, digest
        if took:
            await self._go_back(request, num_to_return=len(took))
        if problem:
            raise TargetRefused(f"target {request.version} was taken back to {request.expected_active}: {problem}")
        return answers, digest

    async def _go_back(self, request: TargetCommitRequest, *, num_to_return: int) -> None:
        """Where a worker keeps the new version, or the label stays wrong, the engine ends: nobody could name its weights."""
        answers = await self._ask("paceline_commit_target", request.expected_active, request.version)
        num_returned = sum("error" not in answer for answer in answers)
        problem = await self._label(request.expected_active)
        if num_returned != num_to_return or problem:
            detail = problem or "; ".join(answer["error"]["message"] for answer in answers if "error" in answer)
            logger.critical("going back to target %d failed, this engine ends: %s", request.expected_active, detail)
            await self._ask("paceline_give_up")

    async def _label(self, version: int) -> str:
        """Name the version in force, from which vLLM makes `weight_versions`; returns what went wrong."""
        try:
            await self._unless_dead(self._core.update_weight_version(str(version)))
        except (EngineError, EngineDeadError):
            raise
        except Exception as error:  # noqa: BLE001 -- as above
            return f"its label could not be set: {error}"
        return ""
