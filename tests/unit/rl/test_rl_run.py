"""Generate, reward, train, update, on everything real but the engines; killed, resumed, and explained."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from pathlib import Path

import pytest
import rl_run_rig
import torch
from generator_rig import importable, run
from rl_run_rig import DEADLINE_S, RunRig, child, kill_after, make_settings, run_rig
from safetensors.torch import load_file

from rl.run import command
from rl.run import run as run_module
from rl.run.again import replay_step
from rl.run.command import System
from rl.run.record import read_record
from rl.run.why import why
from rl.trainer.checkpoint import Checkpoints
from rl.trainer.dumps import Dumps
from rl.trajectory import Trajectory
from wire.errors import ConfigError, PacelineError, TrainerError


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    importable(monkeypatch)


def check_versions(rig: RunRig) -> None:
    """What serves is what the batches on disk make of the target, to the last bit."""
    retrained = rig.retrained(make_settings())
    served = load_file(rig.admin.store.weights(rig.engines.version))
    expected = retrained.weights()
    assert served.keys() == expected.keys()
    assert all(torch.equal(served[name], tensor) for name, tensor in expected.items())


def check_groups(rig: RunRig) -> None:
    """None counts twice; every one that finished was used, was dropped for a reason, or waits."""
    batches = Counter(
        group.group_id for step in range(len(rig.directory.metrics.read())) for group in rig_dumps(rig).batch(step).groups
    )
    assert max(batches.values()) == 1
    trained, evicted = rig.groups_at("trained"), rig.groups_at("evicted")
    assert max(Counter(trained).values()) == max(Counter([*evicted, -1]).values()) == 1
    assert not set(trained) & set(evicted)
    record = read_record(rig.directory.record)
    assert record is not None
    waiting = {entry.group_id for entry in record.ledger.open if entry.finished_rank is not None}
    assert set(rig.groups_at("finished")) <= {*trained, *evicted, *waiting}
    assert {event.reason for event in rig.events() if event.station == "evicted"} <= {"too old", "no signal"}


def rig_dumps(rig: RunRig) -> Dumps:
    return Dumps(rig.directory.dumps, num_kept=16)


def test_a_run_trains_and_serves_version_after_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with run_rig(tmp_path) as rig:
            await rig.conduct(make_settings())
            metrics = rig.directory.metrics.read()
            assert [each.report.step for each in metrics] == [0, 1, 2, 3]
            assert [each.version for each in metrics] == [1, 2, 3, 4]
            assert [version for version, _ in rig.admin.wishes] == [1, 2, 3, 4]
            assert [wish.expected_active for _, wish in rig.admin.wishes] == [0, 1, 2, 3]
            assert all(each.num_with_signal == 2 for each in metrics)
            ages = [each.report.staleness.worst for each in metrics if each.report.staleness is not None]
            assert len(ages) == 4
            assert max(ages) <= 1
            assert rig.admin.store.versions() == [3, 4]
            check_versions(rig)
            check_groups(rig)
            base = load_file(rig.system.target_dir / "model.safetensors")
            newest = load_file(rig.admin.store.weights(4))
            assert any(not torch.equal(base[name], newest[name]) for name in base)
            assert len([line for line in rig.said if line.startswith("step ")]) == 4

    run(scenario())


def test_a_finished_run_goes_on_where_more_steps_are_wanted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with run_rig(tmp_path) as rig:
            await rig.conduct(make_settings(num_steps=2))
            await rig.conduct(make_settings(num_steps=2))
            assert len(rig.directory.metrics.read()) == 2
            await rig.conduct(make_settings(num_steps=4))
            assert [each.report.step for each in rig.directory.metrics.read()] == [0, 1, 2, 3]
            assert rig.engines.version == 4
            check_versions(rig)
            check_groups(rig)

    run(scenario())


def test_held_out_problems_are_measured_before_now_and_then_and_after(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with run_rig(tmp_path) as rig:
            await rig.conduct(make_settings(num_steps=3, heldout={"every_steps": 2, "num_problems": 5}))
            results = rig.directory.heldout.read()
            assert [(result.num_steps, result.version) for result in results] == [(0, 0), (2, 2), (3, 3)]
            assert {len(result.rewards) for result in results} == {5}
            assert {reward for result in results for reward in result.rewards} <= {0.0, 1.0}
            greedy = [body for body in rig.engines.bodies if body["sampling_params"]["temperature"] == 0.0]
            assert len(greedy) == 15
            assert len({tuple(body["token_ids"]) for body in greedy}) == 5
            trained = {tuple(body["token_ids"]) for body in rig.engines.bodies if body not in greedy}
            assert not trained & {tuple(body["token_ids"]) for body in greedy}
            await rig.conduct(make_settings(num_steps=3, heldout={"every_steps": 2, "num_problems": 5}))
            assert rig.directory.heldout.read() == results
            assert "held out, even: " in "\n".join(why(tmp_path, "run", None))

    run(scenario())


def test_temperature_and_problems_go_by_their_controllers_over_a_restart(tmp_path: Path) -> None:
    steering = {"temperature": {"start": 0.8, "target_entropy": 1.0}, "curriculum": {"num_problems": 3}}

    async def scenario() -> None:
        async with run_rig(tmp_path) as rig:
            await rig.conduct(make_settings(num_steps=2, **steering))
            first = read_record(rig.directory.record)
            assert first is not None
            assert first.steering.temperature is not None
            assert first.steering.curricula["even"].num_rounds > 0
            await rig.conduct(make_settings(num_steps=4, **steering))
            # The entropy of random weights over 259 tokens is far above 1 nat: the temperature falls, step by step.
            temperatures = [each.temperature for each in rig.directory.metrics.read()]
            assert temperatures == sorted(temperatures, reverse=True)
            assert len(set(temperatures)) == 4
            assert temperatures[0] < 0.8
            seeds = {event.environment_seed for event in rig.events()}
            assert seeds <= {0, 1, 2}
            asked = {body["sampling_params"]["temperature"] for body in rig.engines.bodies}
            assert asked & set(temperatures)

    run(scenario())


def test_a_killed_run_goes_on_with_every_finished_group_and_none_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with run_rig(tmp_path, pause_s=0.01) as rig:
            for num_metrics, num_more in ((1, 1), (2, 0), (3, 2)):
                await kill_after(rig, num_metrics, num_more)
            left = finished_groups(rig)
            assert await child(rig).wait() == 0
            assert [each.report.step for each in rig.directory.metrics.read()] == [0, 1, 2, 3]
            check_versions(rig)
            check_groups(rig)
            assert left <= {*rig.groups_at("trained"), *rig.groups_at("evicted"), *finished_groups(rig)}

    run(scenario())


def finished_groups(rig: RunRig) -> set[int]:
    record = read_record(rig.directory.record)
    entries = (*record.ledger.open, *record.ledger.training) if record is not None else ()
    return {entry.group_id for entry in entries if entry.finished_rank is not None}


def test_a_damaged_record_or_batch_goes_back_to_the_checkpoint(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with run_rig(tmp_path) as rig:
            await rig.conduct(make_settings(num_steps=2))
            assert Checkpoints(rig.directory.checkpoints, num_kept=2).steps() == [2]
            rig.directory.record.write_bytes(b"no record")
            (rig.directory.dumps / "1.batch").unlink()
            await rig.conduct(make_settings(num_steps=3))
            assert [each.report.step for each in rig.directory.metrics.read()] == [0, 1, 2]
            trained = rig.groups_at("trained")
            assert len(trained) == len(set(trained)) == 6

    run(scenario())


def test_a_checkpoint_that_a_kill_cut_off_is_made_up_for_before_the_next_step(tmp_path: Path) -> None:
    """Else the batches since the last whole one would be gone before the next one is due."""

    async def scenario() -> None:
        async with run_rig(tmp_path) as rig:
            settings = {
                "checkpoint_every_steps": 2,
                "trainer": {"learning_rate": 1e-2, "max_output_tokens": 32, "num_dumps": 2},
            }
            await rig.conduct(make_settings(num_steps=2, **settings))
            (rig.directory.checkpoints / "2.safetensors").rename(rig.directory.checkpoints / "2.tmp")
            for num_steps in (3, 4, 5):
                await rig.conduct(make_settings(num_steps=num_steps, **settings))
                (rig.directory.checkpoints / f"{num_steps}.safetensors").unlink()
                assert not list(rig.directory.checkpoints.glob("*.tmp"))
            assert [each.report.step for each in rig.directory.metrics.read()] == [0, 1, 2, 3, 4]
            trained = rig.groups_at("trained")
            assert len(trained) == len(set(trained)) == 10

    run(scenario())


def test_rollouts_of_a_group_that_runs_are_on_disk_before_it_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "RECORD_EVERY_S", 0.01)
    generator = {"group_size": 6, "max_output_tokens": 32, "concurrency": {"least": 6, "most": 6}}
    settings = make_settings(num_steps=2, generator=generator)

    async def scenario() -> None:
        async with run_rig(tmp_path, fault=lambda number: "hang" if number % 3 == 0 else "") as rig:
            conducted = asyncio.create_task(rig.conduct(settings))
            async with asyncio.timeout(DEADLINE_S):
                while not (kept := finished_rollouts(rig)):
                    assert not conducted.done(), conducted.exception()
                    await asyncio.sleep(0.01)
            assert rig.groups_at("finished") == []
            conducted.cancel()
            await asyncio.wait([conducted])
            rig.engines.fault = lambda number: ""
            await rig.conduct(settings)
            for (group_id, sample_index), trajectories in kept.items():
                found = rig.directory.finished.read(group_id).trajectories[sample_index]
                assert found.turns == trajectories[0].turns

    run(scenario())


def finished_rollouts(rig: RunRig) -> dict[tuple[int, int], tuple[Trajectory, ...]]:
    """Of groups that run, as the record has them."""
    record = read_record(rig.directory.record)
    groups = record.generator.groups if record is not None else ()
    return {(group.group_id, each.sample_index): each.finished for group in groups for each in group.rollouts if each.finished}


def test_versions_that_are_gone_from_the_store_are_written_anew(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with run_rig(tmp_path) as rig:
            await rig.conduct(make_settings(num_steps=2))
            before = load_file(rig.admin.store.weights(2))
            (rig.admin.store.directory(2)).rename(tmp_path / "away")
            rig.engines.version = 0
            await rig.conduct(make_settings(num_steps=2))
            assert rig.engines.version == 3
            after = load_file(rig.admin.store.weights(3))
            assert all(torch.equal(after[name], tensor) for name, tensor in before.items())

    run(scenario())


def test_a_new_run_begins_with_the_target_itself_whatever_serves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with run_rig(tmp_path) as rig:
            rig.engines.version = 5
            await rig.conduct(make_settings(num_steps=1))
            assert [(version, wish.expected_active) for version, wish in rig.admin.wishes] == [(0, 5), (1, 0)]

    run(scenario())


def test_a_target_that_engines_refuse_ends_the_run_with_their_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with run_rig(tmp_path, admin_fault=lambda number: "bad_artifact" if number == 1 else "") as rig:
            with pytest.raises(ExceptionGroup) as caught:
                await rig.conduct(make_settings())
            (error,) = caught.value.exceptions
            assert isinstance(error, PacelineError)
            assert "target 2 is refused (bad_artifact)" in str(error)
            assert rig.engines.version == 1
            await rig.conduct(make_settings())
            assert [each.report.step for each in rig.directory.metrics.read()] == [0, 1, 2, 3]
            # Made again to the last bit, the weights keep their number: nothing that waits looks older than it is.
            assert [version for version, _ in rig.admin.wishes] == [1, 2, 2, 3, 4]
            assert not [event for event in rig.events() if event.station == "evicted" and event.reason != "no signal"]
            check_versions(rig)
            check_groups(rig)

    run(scenario())


def test_two_processes_do_not_share_a_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with run_rig(tmp_path) as rig:
            handle = rig.directory.lock()
            assert rig.directory.is_locked()
            with pytest.raises(ConfigError, match="going on in another process"):
                rl_run_rig.main(tmp_path, rig.engines.url, rig.admin.url, "{}", json.dumps(rig.environment))
            os.close(handle)
            assert not rig.directory.is_locked()

    run(scenario())


def test_engines_of_another_dtype_are_refused(tmp_path: Path) -> None:
    system = System(state_dir=tmp_path, target_dir=tmp_path, gateway_url="", admin_url="", operator_token="", dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"rl\.trainer\.dtype is float32, but the engines compute in bfloat16"):
        command.run(make_settings(), [object()], system, print)  # type: ignore[list-item]


def test_a_step_that_is_made_again_comes_out_as_the_run_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with run_rig(tmp_path) as rig:
            await rig.conduct(make_settings(num_steps=2))
            target_dir = rig.system.target_dir
            report, verdict = replay_step(tmp_path, "run", target_dir, 2)
            assert json.loads(report)["step"] == 1
            assert verdict == "it is what the run told, to the last bit"
            told = rig.directory.dumps / "1.json"
            told.write_text(json.dumps(json.loads(told.read_text()) | {"entropy": 0.5}))
            assert list(replay_step(tmp_path, "run", target_dir, 2))[-1] == "it differs from what the run told in entropy"
            with pytest.raises(TrainerError, match="step 3 is number 2 on disk"):
                list(replay_step(tmp_path, "run", target_dir, 3))
            with pytest.raises(ConfigError, match="--step counts from 1"):
                list(replay_step(tmp_path, "run", target_dir, 0))

    run(scenario())


def test_why_tells_of_the_run_and_of_each_group(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with run_rig(tmp_path) as rig:
            await rig.conduct(make_settings(num_steps=2))
            page = "\n".join(why(tmp_path, "run", None))
            assert "run run: 2 of 2 steps, does not run" in page
            assert "what limits it: the " in page
            used = rig.groups_at("trained")[0]
            told = "\n".join(why(tmp_path, "run", str(used)))
            assert "used: step 1 learned from it" in told
            assert told.count("by target 0, proposed by draft 4 when it began") == 3
            record = read_record(rig.directory.record)
            assert record is not None
            for entry in record.ledger.open:
                verdict = "waits: " if entry.finished_rank is not None else "runs: "
                assert verdict in "\n".join(why(tmp_path, "run", str(entry.group_id)))
            one = "\n".join(why(tmp_path, "run", f"{used}.1"))
            assert "rollout 1: reward " in one
            assert "rollout 0: " not in one

    run(scenario())


@pytest.mark.parametrize(
    ("group", "message"), [("7777", "has no group 7777"), ("a", "takes a group's number"), ("0.9", "no 9")]
)
def test_why_says_what_there_is_not(tmp_path: Path, group: str, message: str) -> None:
    async def scenario() -> None:
        async with run_rig(tmp_path) as rig:
            await rig.conduct(make_settings(num_steps=1))
            with pytest.raises(ConfigError, match=message):
                list(why(tmp_path, "run", group))

    run(scenario())


def test_why_of_a_run_there_is_not_says_how_to_begin_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="paceline rl run CONFIG"):
        list(why(tmp_path, "run", None))
