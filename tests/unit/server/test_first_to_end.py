"""Work and what may end it before its time: whoever comes first is told, nothing goes on, and no cancellation is lost or left over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

import pytest
from gateway_rig import run

from server.relay.proxy import first_to_end


class Scene:
    """Work that waits to be let go, and two watches; `log` has who was cancelled."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.work_goes, self.first_goes, self.second_goes = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def wait(self, name: str, event: asyncio.Event) -> None:
        try:
            await event.wait()
        except asyncio.CancelledError:
            self.log.append(name)
            raise

    def run(self, work: Coroutine[Any, Any, None] | None = None) -> Coroutine[Any, Any, int]:
        work = work or self.wait("work", self.work_goes)
        return first_to_end(work, self.wait("first", self.first_goes), self.wait("second", self.second_goes))


async def settled() -> None:
    """Let everything that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def outcome(scene: Scene, work: Coroutine[Any, Any, None] | None, acts: Iterable[Callable[[], object]]) -> int:
    """What comes of it when all that is done in one turn; the caller's task is as good as new then."""
    caller = asyncio.ensure_future(_as_caller(scene, work))
    await settled()
    for act in acts:
        act()
    return await caller


async def _as_caller(scene: Scene, work: Coroutine[Any, Any, None] | None) -> int:
    ended = await scene.run(work)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    async with asyncio.timeout(10):
        await settled()
    return ended


def test_work_that_ends_first_ends_the_watches() -> None:
    async def scenario() -> None:
        scene = Scene()
        assert await outcome(scene, None, [scene.work_goes.set]) == 0
        assert sorted(scene.log) == ["first", "second"]

    run(scenario())


def test_work_that_never_waits_is_done_before_any_watch_is_asked() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.first_goes.set()

        async def work() -> None:
            scene.log.append("done")

        assert await outcome(scene, work(), []) == 0
        assert scene.log == ["done"]

    run(scenario())


@pytest.mark.parametrize("number", [1, 2])
def test_a_watch_that_ends_first_ends_the_work_and_the_other_watch(number: int) -> None:
    async def scenario() -> None:
        scene = Scene()
        goes = [scene.first_goes, scene.second_goes][number - 1]
        assert await outcome(scene, None, [goes.set]) == number
        assert sorted(scene.log) == sorted(["work", ["second", "first"][number - 1]])

    run(scenario())


def test_of_two_watches_in_one_turn_the_earlier_is_told() -> None:
    async def scenario() -> None:
        scene = Scene()
        assert await outcome(scene, None, [scene.second_goes.set, scene.first_goes.set]) == 2
        assert scene.log == ["work"]

    run(scenario())


@pytest.mark.parametrize("is_work_first", [True, False])
def test_work_and_a_watch_that_end_in_one_turn_leave_nothing_over(is_work_first: bool) -> None:
    async def scenario() -> None:
        scene = Scene()
        acts = [scene.work_goes.set, scene.first_goes.set]
        ended = await outcome(scene, None, acts if is_work_first else acts[::-1])
        assert ended in (0, 1)
        assert ("work" in scene.log) == (ended == 1)

    run(scenario())


def test_the_works_error_is_raised() -> None:
    async def scenario() -> None:
        scene = Scene()

        async def work() -> None:
            await scene.work_goes.wait()
            raise ValueError("of the work")

        with pytest.raises(ValueError, match="of the work"):
            await outcome(scene, work(), [scene.work_goes.set])
        assert sorted(scene.log) == ["first", "second"]

    run(scenario())


def test_the_error_of_the_watch_that_ended_the_work_is_raised() -> None:
    async def scenario() -> None:
        scene = Scene()

        async def watch() -> None:
            await scene.first_goes.wait()
            raise ValueError("of the watch")

        caller = asyncio.ensure_future(first_to_end(scene.wait("work", scene.work_goes), watch()))
        await settled()
        scene.first_goes.set()
        with pytest.raises(ValueError, match="of the watch"):
            await caller
        assert scene.log == ["work"]

    run(scenario())


@pytest.mark.parametrize("order", ["alone", "before", "after"])
def test_the_callers_own_cancellation_comes_through_whatever_ends_in_the_same_turn(order: str) -> None:
    async def scenario() -> None:
        scene = Scene()
        caller = asyncio.ensure_future(scene.run())
        await settled()
        if order == "before":
            caller.cancel()
        if order != "alone":
            scene.first_goes.set()
            # The watch is done, and what its end calls has yet to run or has just run.
            await asyncio.sleep(0)
        if order != "before":
            caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert caller.cancelled()
        assert caller.cancelling() == 1
        assert scene.log.count("work") == 1

    run(scenario())


def test_the_callers_own_cancellation_while_the_work_cleans_up_comes_through() -> None:
    async def scenario() -> None:
        scene = Scene()

        async def work() -> None:
            try:
                await scene.work_goes.wait()
            finally:
                await settled()

        caller = asyncio.ensure_future(scene.run(work()))
        await settled()
        scene.first_goes.set()
        for _ in range(4):
            await asyncio.sleep(0)
        assert not caller.done()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert caller.cancelling() == 1

    run(scenario())


def test_a_caller_that_is_being_cancelled_already_can_still_wait() -> None:
    async def scenario() -> None:
        scene = Scene()
        ended: list[int] = []

        async def cleaning_up() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(await scene.run())

        caller = asyncio.ensure_future(cleaning_up())
        await settled()
        caller.cancel()
        await settled()
        scene.first_goes.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert (ended, caller.cancelling()) == ([1], 1)

    run(scenario())


def test_a_timeout_within_the_work_stays_there() -> None:
    async def scenario() -> None:
        scene = Scene()

        async def work() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.001):
                    await scene.wait("slow", asyncio.Event())
            await scene.work_goes.wait()

        assert await outcome(scene, work(), [scene.work_goes.set]) == 0
        assert "slow" in scene.log

    run(scenario())


@pytest.mark.parametrize("num_turns", range(3))
def test_a_watch_ends_the_work_though_a_timeout_within_expires_about_then(num_turns: int) -> None:
    async def scenario() -> None:
        scene = Scene()
        scopes: list[asyncio.Timeout] = []

        async def work() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as scope:
                    scopes.append(scope)
                    await scene.work_goes.wait()
            await scene.wait("went on", asyncio.Event())

        caller = asyncio.ensure_future(_as_caller(scene, work()))
        await settled()
        scene.first_goes.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        scopes[0].reschedule(asyncio.get_running_loop().time())
        assert await caller == 1
        assert "second" in scene.log

    run(scenario())


def test_a_timeout_around_it_all_expires_as_one() -> None:
    async def scenario() -> None:
        scene = Scene()
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await scene.run()
        assert task.cancelling() == 0
        assert sorted(scene.log) == ["first", "second", "work"]

    run(scenario())


def test_work_that_ends_well_though_it_was_to_be_cancelled_has_ended() -> None:
    async def scenario() -> None:
        scene = Scene()

        async def work() -> None:
            with suppress(asyncio.CancelledError):
                await scene.work_goes.wait()

        assert await outcome(scene, work(), [scene.first_goes.set]) == 0

    run(scenario())
