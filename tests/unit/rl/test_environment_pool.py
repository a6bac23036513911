"""Episodes on real worker processes, which are killed, hang and misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import msgpack
from waiting import wait_until

from rl.environments.frames import FromWorker, Reply, ResetCall, StepCall
from rl.environments.interface import Action, Chat, ChatMessage, Excluded, Problem, Scored, Split, Step, Text, Tokens
from rl.environments.pool import MAX_RESTARTS, EnvironmentPool, RemoteEpisode
from rl.environments.registry import read_environments
from rl.environments.single_turn import SingleTurnEpisode
from rl.environments.worker import Worker
from wire.errors import ConfigError

HERE = Path(__file__).parent
CORRIDOR = {
    "name": "corridor",
    "kind": "gym",
    "factory": "played_environments:Corridor",
    "reward_range": [-1.0, 1.0],
    "actions": {"left": 0, "right": 1},
}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parents[2]), str(HERE)]))


def misbehaving(how: str, **parameters: str) -> dict[str, Any]:
    return CORRIDOR | {
        "name": how,
        "factory": "played_environments:Misbehaving",
        "parameters": {"how": how, **parameters},
    }


def with_pool(
    tables: list[dict[str, Any]],
    play: Callable[[EnvironmentPool], Awaitable[None]],
    *,
    num_workers: int = 1,
    call_timeout_s: float = 60.0,
) -> None:
    async def run() -> None:
        pool = await EnvironmentPool.start(
            read_environments(tables, source="test"), num_workers=num_workers, call_timeout_s=call_timeout_s
        )
        try:
            await play(pool)
        finally:
            await pool.close()

    asyncio.run(run())


async def opened(pool: EnvironmentPool, name: str, seed: int = 3) -> RemoteEpisode:
    episode = await pool.reset(Problem(name, seed))
    assert isinstance(episode, RemoteEpisode), episode
    return episode


def way_to_treasure(step: Step) -> Action:
    assert isinstance(step.observation, Chat)
    place, treasure = map(int, re.findall(r"\d+", step.observation.messages[-1].content))
    return Action("right" if treasure > place else "left")


async def walk(episode: RemoteEpisode, before_each: Callable[[int], None] = lambda turn: None) -> Scored | Excluded:
    step: Step | Excluded = episode.first
    for turn in range(32):
        if isinstance(step, Excluded) or step.is_done:
            break
        before_each(turn)
        step = await episode.step(way_to_treasure(step))
    return await episode.score()


def test_a_simulator_is_played_to_its_end_in_a_worker() -> None:
    async def play(pool: EnvironmentPool) -> None:
        scored = await walk(await opened(pool, "corridor"))
        assert isinstance(scored, Scored)
        num_turns = scored.info["num_turns"]
        assert isinstance(num_turns, int)
        total = 1.0 - 0.1 * (num_turns - 1)
        assert scored.info["return"] == pytest.approx(total)
        assert scored.reward == pytest.approx((total + 1) / 2)
        assert not scored.is_truncated
        assert os.getpid() not in pool.worker_pids
        assert [os.getsid(pid) for pid in pool.worker_pids] == pool.worker_pids  # a terminal's Ctrl-C does not reach them

    with_pool([CORRIDOR], play)


def test_a_killed_worker_loses_nothing() -> None:
    """Killed before every single turn and before the score, episodes end as they do undisturbed."""

    async def play(pool: EnvironmentPool) -> None:
        undisturbed = [await walk(await opened(pool, "corridor", seed)) for seed in range(6)]

        def kill(turn: int) -> None:
            for pid in pool.worker_pids:
                os.kill(pid, signal.SIGKILL)

        episodes = [await opened(pool, "corridor", seed) for seed in range(6)]
        disturbed = [await walk(episode, kill) for episode in episodes]
        assert disturbed == undisturbed
        assert all(isinstance(scored, Scored) for scored in disturbed)
        assert pool.num_restarts > 0

    with_pool([CORRIDOR], play, num_workers=2)


def test_a_worker_killed_during_a_call_is_replaced_and_the_call_answered() -> None:
    async def play(pool: EnvironmentPool) -> None:
        episode = await opened(pool, "corridor")
        (pid,) = pool.worker_pids
        os.kill(pid, signal.SIGSTOP)  # the call is certainly under way when the worker dies
        call = asyncio.create_task(episode.step(way_to_treasure(episode.first)))
        await asyncio.sleep(0)
        assert not call.done()
        os.kill(pid, signal.SIGKILL)
        assert isinstance(await call, Step)
        assert episode.num_restarts == 1
        assert pid not in pool.worker_pids

    with_pool([CORRIDOR], play)


def test_an_environment_that_kills_every_worker_is_excluded_and_the_others_go_on() -> None:
    async def play(pool: EnvironmentPool) -> None:
        neighbour = await opened(pool, "corridor")
        poison = await opened(pool, "die")
        excluded = await poison.step(Action("left"))
        assert isinstance(excluded, Excluded)
        assert excluded.reason == "worker_died"
        assert poison.num_restarts == 1 + MAX_RESTARTS
        assert await poison.score() == excluded
        assert isinstance(await walk(neighbour), Scored)

    with_pool([CORRIDOR, misbehaving("die")], play)


def test_neighbours_of_an_environment_that_kills_every_worker_are_not_excluded() -> None:
    """Their calls are under way on the same worker each time it is killed."""

    async def play(pool: EnvironmentPool) -> None:
        poison = await opened(pool, "die")
        neighbours = [await opened(pool, "corridor", seed) for seed in range(3)]
        excluded, *steps = await asyncio.gather(
            poison.step(Action("left")), *(episode.step(way_to_treasure(episode.first)) for episode in neighbours)
        )
        assert isinstance(excluded, Excluded)
        assert all(isinstance(step, Step) for step in steps)

    with_pool([CORRIDOR, misbehaving("die")], play)


def test_an_environment_that_hangs_is_excluded() -> None:
    async def play(pool: EnvironmentPool) -> None:
        excluded = await (await opened(pool, "hang")).step(Action("left"))
        assert isinstance(excluded, Excluded)
        assert excluded.reason == "unresponsive"

    with_pool([misbehaving("hang")], play, call_timeout_s=3.0)


@pytest.mark.parametrize(
    ("how", "reason", "says"), [("raise", "crashed", "the simulator is broken"), ("nan", "failed", "reward of nan")]
)
def test_an_environment_that_raises_or_says_nonsense_is_excluded_and_its_worker_lives(how: str, reason: str, says: str) -> None:
    async def play(pool: EnvironmentPool) -> None:
        pids = pool.worker_pids
        episode = await opened(pool, how)
        excluded = await episode.step(Action("left"))
        assert isinstance(excluded, Excluded)
        assert excluded.reason == reason
        assert says in excluded.detail
        assert isinstance(await walk(await opened(pool, "corridor")), Scored)
        assert pool.worker_pids == pids

    with_pool([CORRIDOR, misbehaving(how)], play)


def test_what_an_environment_prints_does_not_disturb_the_channel() -> None:
    async def play(pool: EnvironmentPool) -> None:
        assert isinstance(await walk(await opened(pool, "print")), Scored)
        assert pool.num_restarts == 0

    with_pool([misbehaving("print")], play)


def test_an_episode_that_goes_another_way_from_the_same_seed_is_excluded(tmp_path: Path) -> None:
    async def play(pool: EnvironmentPool) -> None:
        excluded = await (await opened(pool, "differ")).step(Action("left"))
        assert isinstance(excluded, Excluded)
        assert excluded.reason == "not_reproducible"

    with_pool([misbehaving("differ", marker=str(tmp_path / "died"))], play)


def test_a_state_that_is_a_tuple_is_text_and_a_list_of_whole_numbers_is_token_ids() -> None:
    tuples = CORRIDOR | {"name": "tuples", "factory": "played_environments:TupleState"}
    instructed = tuples | {"name": "instructed", "instruction": "Walk."}
    tokens = CORRIDOR | {"name": "tokens", "factory": "played_environments:TokenEcho"}

    async def play(pool: EnvironmentPool) -> None:
        for name, system in (("tuples", ()), ("instructed", (ChatMessage("system", "Walk."),))):
            episode = await opened(pool, name)
            assert isinstance(episode.first.observation, Chat)
            assert episode.first.observation.messages[:-1] == system
            step = await episode.step(Action("left" if "(0" not in episode.first.observation.messages[-1].content else "right"))
            assert isinstance(step, Step)
            assert step.observation is None or isinstance(step.observation, Chat)
            assert set(step.info) == {"place"}
        assert (await opened(pool, "tokens")).first.observation == Tokens((1, 2, 3))

    with_pool([tuples, instructed, tokens], play)


@pytest.mark.parametrize("how", ["", "broken reset", "broken step", "broken close", "given up"])
def test_what_an_episode_holds_is_given_back_however_it_ends(how: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    table = CORRIDOR | {"factory": "played_environments:Held", "parameters": {"notes": str(notes), "how": how}}

    async def play(pool: EnvironmentPool) -> None:
        episode = await pool.reset(Problem("corridor", 3))
        if how == "given up":
            assert isinstance(episode, RemoteEpisode)
            await episode.close()
        elif isinstance(episode, RemoteEpisode):
            assert isinstance(await walk(episode), Excluded if how == "broken step" else Scored)
        wait_until(lambda: notes.read_text() == "opened\nclosed\n", "for the end of the simulator")

    with_pool([table], play)
    assert notes.read_text() == "opened\nclosed\n"


def test_episodes_that_are_open_when_the_pool_closes_are_closed(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    table = CORRIDOR | {"factory": "played_environments:Held", "parameters": {"notes": str(notes)}}

    async def play(pool: EnvironmentPool) -> None:
        await opened(pool, "corridor")

    with_pool([table], play)
    assert notes.read_text() == "opened\nclosed\n"


async def cancelled_under_way(pool: EnvironmentPool, call: Any) -> None:
    """Cancel a call that the worker has been sent and does not answer yet."""
    (worker,) = pool._workers
    os.kill(worker.pid, signal.SIGSTOP)
    task = asyncio.ensure_future(call)
    while not worker._pending:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    os.kill(worker.pid, signal.SIGCONT)


def test_a_cancelled_step_is_not_taken() -> None:
    async def play(pool: EnvironmentPool) -> None:
        undisturbed = await walk(await opened(pool, "corridor"))
        episode = await opened(pool, "corridor")
        await cancelled_under_way(pool, episode.step(way_to_treasure(episode.first)))
        assert await walk(episode) == undisturbed

    with_pool([CORRIDOR], play)


def test_an_episode_whose_reset_is_cancelled_is_given_back(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    table = CORRIDOR | {"factory": "played_environments:Held", "parameters": {"notes": str(notes)}}

    async def play(pool: EnvironmentPool) -> None:
        await cancelled_under_way(pool, pool.reset(Problem("corridor", 3)))
        assert pool._workers[0].num_episodes == 0
        wait_until(lambda: notes.exists() and notes.read_text() == "opened\nclosed\n", "for the end of the simulator")

    with_pool([table], play)


def test_nothing_begins_once_the_pool_is_closed() -> None:
    async def play(pool: EnvironmentPool) -> None:
        episode = await opened(pool, "corridor")
        pids = pool.worker_pids
        await pool.close()
        excluded = await episode.step(way_to_treasure(episode.first))
        assert isinstance(excluded, Excluded)
        assert "closed" in excluded.detail
        assert pool.worker_pids == pids

    with_pool([CORRIDOR], play)


def test_a_message_that_the_pool_cannot_read_excludes_its_episode_and_the_worker_lives() -> None:
    class OddEpisode(SingleTurnEpisode[Any]):
        def __init__(self) -> None:
            """There is no problem."""

        @property
        def first(self) -> Step:
            return Step(Text("begin"))

        async def step(self, action: Action) -> Step:
            return Step(Text("x" * int(action.text)), info={3: 4} if action.text == "3" else {})  # type: ignore[dict-item]

    class Odd:
        async def reset(self, seed: int, split: Split) -> OddEpisode:
            return OddEpisode()

        async def close(self) -> None:
            pass

    async def run() -> None:
        worker = Worker({"odd": Odd()})
        for text, says in (("2", None), ("3", "Expected `str`"), (str(65 << 20), "bytes")):
            await worker.reply(ResetCall(1, Problem("odd", 0)))
            reply = msgpack.decode(await worker.reply(StepCall(1, Action(text))), type=FromWorker)
            assert isinstance(reply, Reply)
            if says is None:
                assert isinstance(reply.result, Step)
            else:
                assert isinstance(reply.result, Excluded)
                assert says in reply.result.detail

    asyncio.run(run())


def test_a_pool_has_a_worker_at_least() -> None:
    with pytest.raises(ConfigError, match="a worker or more"):
        with_pool([CORRIDOR], lambda pool: asyncio.sleep(0), num_workers=0)


def test_many_episodes_share_few_workers() -> None:
    async def play(pool: EnvironmentPool) -> None:
        episodes = [await opened(pool, "corridor", seed) for seed in range(20)]
        scored = await asyncio.gather(*(walk(episode) for episode in episodes))
        assert all(isinstance(score, Scored) for score in scored)
        assert len(pool.worker_pids) == 2

    with_pool([CORRIDOR], play, num_workers=2)


def test_a_worker_that_cannot_build_an_environment_says_why() -> None:
    table = {"name": "x", "kind": "reasoning_gym", "task": "no_such_task"}
    with pytest.raises(ConfigError, match="no task 'no_such_task'"):
        with_pool([table], lambda pool: asyncio.sleep(0))


def test_a_problem_of_an_unknown_environment_names_those_that_exist() -> None:
    async def play(pool: EnvironmentPool) -> None:
        with pytest.raises(ConfigError, match="'maze'; there are corridor"):
            await pool.reset(Problem("maze", 0))

    with_pool([CORRIDOR], play)


def test_workers_end_with_the_pool() -> None:
    pids: list[int] = []

    async def play(pool: EnvironmentPool) -> None:
        pids.extend(pool.worker_pids)

    with_pool([CORRIDOR], play, num_workers=2)
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
