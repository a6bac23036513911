"""What the scenario does to the system, at its times, through the admin API or by a signal."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

import msgspec

from loadtest.records import ActionRecord
from loadtest.run.clock import Clock
from loadtest.run.target import Admin, Target, TargetError
from loadtest.scenario import Action, Scenario
from wire.control import DraftList


def check(scenario: Scenario, target: Target) -> None:
    """Raises TargetError where the target cannot be done to what the scenario wants."""
    wanted = {action.do for action in scenario.action}
    if wanted - {"kill"} and target.admin is None:
        raise TargetError(
            f"the scenario wants {sorted(wanted - {'kill'})}, for which it needs the admin API: run it beside the system's "
            "state directory, or give --admin-url and PACELINE_OPERATOR_TOKEN"
        )
    killed = {action.process for action in scenario.action if action.do == "kill"}
    unknown = killed - set(target.process_ids())
    if unknown:
        raise TargetError(f"the scenario kills {sorted(unknown)}; running here are {sorted(target.process_ids())}")


class Actions:
    """Carries them out; one that fails is noted and the run goes on."""

    def __init__(self, actions: Sequence[Action], target: Target, clock: Clock, end_s: float) -> None:
        self._actions = actions
        self._target = target
        self._clock = clock
        self._end_s = end_s
        self.done: list[ActionRecord] = []

    async def run(self) -> None:
        """Returns when all are done; those that repeat end with the run, or at their `until_s`."""
        async with asyncio.TaskGroup() as group:
            for action in self._actions:
                group.create_task(self._repeat(action))

    async def _repeat(self, action: Action) -> None:
        at_s = action.at_s
        while at_s < min(self._end_s, action.until_s or self._end_s):
            await self._clock.until(at_s)
            await self._do(action)
            if action.every_s is None:
                return
            at_s = max(at_s + action.every_s, self._clock.now_s())

    async def _do(self, action: Action) -> None:
        at_s = self._clock.now_s()
        problem: str | None = None
        try:
            await self._carry_out(action)
        except (TargetError, OSError, msgspec.ValidationError) as error:
            problem = str(error)
        ended_at_s = self._clock.now_s()
        self.done.append(ActionRecord(at_s=at_s, ended_at_s=ended_at_s, do=action.do, process=action.process, problem=problem))

    async def _carry_out(self, action: Action) -> None:
        if action.do == "kill":
            pid = self._target.process_ids().get(action.process)
            if pid is None:
                raise TargetError(f"{action.process} is not running")
            os.kill(pid, signal.SIGKILL)
            return
        admin = self._target.admin
        assert admin is not None, "checked before the run"
        match action.do:
            case "swap":
                await _swap(admin)
            case "rollback":
                await admin.call("POST", "/admin/drafts/rollback", {})
            case "pause_learner" | "resume_learner":
                await admin.call("POST", f"/admin/learner/{action.do.removesuffix('_learner')}", {})
            case _:
                await admin.call("POST", f"/admin/engines/{action.process}/{action.do}", {})


async def _swap(admin: Admin) -> None:
    """Activate the newest other draft. Forced: it is the swap that is tested, not the draft."""
    drafts = msgspec.convert(await admin.call("GET", "/admin/drafts"), DraftList)
    others = [
        entry.version for entry in drafts.drafts if entry.version != drafts.active_version and "unreadable" not in entry.marks
    ]
    if not others:
        raise TargetError(f"there is no draft to swap to but {drafts.active_version}, which is active")
    body = {"expected_active": drafts.active_version, "force": True}
    await admin.call("POST", f"/admin/drafts/{max(others)}/activate", body)
