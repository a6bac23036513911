"""What limits a run and what is wrong with it, from metrics made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rl_samples import make_trajectory

from rl.config import RunSettings
from rl.rewards.audit import Audit
from rl.rewards.cooper import RewardModelReport
from rl.run.diagnosis import shares, what_is_wrong, what_limits
from rl.run.directory import RunDirectory
from rl.run.lines import Lines
from rl.run.metrics import StepMetrics, progress
from rl.run.why import why
from rl.trainer.metrics import Spread, StepReport, UpdateMetrics
from rl.trajectory import Group, RewardPart

UPDATE = UpdateMetrics(
    loss=0.25,
    kl_loss=0.0,
    grad_norm=1.0,
    learning_rate=1e-5,
    num_tokens=10,
    masked_fraction=0.0,
    truncated_fraction=0.0,
    clipped_high_fraction=0.0,
    clipped_low_fraction=0.0,
)
REPORT = StepReport(
    step=0,
    version=0,
    num_groups=4,
    dropped_group_ids=(),
    num_rollouts=8,
    num_failed=0,
    num_tokens=100,
    updates=(UPDATE,),
    entropy=1.0,
    rewards=Spread.of([0.0, 0.5]),
    truncated_rollout_fraction=0.0,
)
HEALTHY = StepMetrics(
    at_s=1.0,
    version=1,
    report=REPORT,
    temperature=1.0,
    num_with_signal=4,
    wait_s=1.0,
    train_s=1.0,
    counts={"num_requests": 100, "num_tokens": 900},
)


def changed(report: dict[str, Any] | None = None, **changes: Any) -> StepMetrics:
    return replace(HEALTHY, report=replace(REPORT, **(report or {})), **changes)


@pytest.mark.parametrize(
    ("changes", "settings", "expected"),
    [
        ({"wait_s": 5.0}, {}, "the generator: "),
        ({"wait_s": 5.0}, {"eta": 0}, "eta is 0"),
        ({"wait_s": 5.0, "environment_share": 0.8}, {}, "raise rl.num_workers"),
        ({"train_s": 5.0}, {}, "the trainer: "),
        ({"write_s": 2.0, "activate_s": 3.0}, {}, "changes of the target: "),
        ({"keep_s": 5.0}, {}, "raise rl.checkpoint_every_steps"),
        ({"heldout_s": 5.0}, {}, "raise rl.heldout.every_steps"),
        ({"lesson_s": 5.0}, {}, "asking environments about corrupted answers"),
    ],
)
def test_what_takes_most_of_the_time_limits_the_run(changes: dict[str, Any], settings: dict[str, Any], expected: str) -> None:
    metrics = [changed(**changes)] * 3
    assert expected in what_limits(metrics, RunSettings.build(settings, source="test"))
    assert sum(shares(metrics).values()) == pytest.approx(1.0)


def test_a_healthy_run_has_nothing_wrong() -> None:
    assert list(what_is_wrong([HEALTHY] * 4)) == []


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (
            [changed({"alarms": ("k3 is 2, healthy is 0 to 1; do this",)})],
            "in 1 of 1 steps: k3 is 2, healthy is 0 to 1; do this",
        ),
        ([changed({"updates": (replace(UPDATE, skipped="the loss is nan"),)})], "left out, the last because the loss is nan"),
        (
            [changed(num_with_signal=1)],
            "75% of the groups have equal rewards and teach nothing, at a mean reward of 0.25: ask easier",
        ),
        ([changed({"rewards": Spread.of([1.0])}, num_with_signal=1)], "ask harder problems"),
        ([HEALTHY, changed({"entropy": 0.2})], "the entropy fell from 1.00 to 0.20"),
        ([changed({"truncated_rollout_fraction": 0.5})], "50% of the rollouts are cut off"),
        ([changed(num_evicted={"too old": 3})], "3 groups became too old against 4"),
        ([changed(num_evicted={"failed": 1})], "1 groups failed"),
        ([changed(counts={"num_bad_answers": 2})], "2 answers of engines could not be believed"),
        ([changed(counts={"num_lost": 9, "num_requests": 20})], "9 of 20 requests were lost"),
        ([changed(counts={"num_unattributed_tokens": 90, "num_tokens": 100})], "90 tokens were drawn twice"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(metrics: list[StepMetrics], expected: str) -> None:
    (told,) = what_is_wrong(metrics)
    assert expected in told


def test_two_limits_of_one_number_are_two_alarms() -> None:
    alarms = ("k3 is 2, healthy is 0 to 1; sync more often", "k3 is 0.01, healthy is 0 to 0.003; check the checksum")
    told = list(what_is_wrong([changed({"alarms": alarms}), changed({"alarms": (alarms[0].replace("2", "3"),)})]))
    assert told == [
        "in 2 of 2 steps: k3 is 3, healthy is 0 to 1; sync more often",
        "in 1 of 2 steps: k3 is 0.01, healthy is 0 to 0.003; check the checksum",
    ]


def test_a_line_tells_a_step_and_ends_with_what_is_wrong() -> None:
    line = progress(changed({"alarms": ("it drifts",)}, num_tokens=30), 9)
    assert line.startswith("step 1/9: target 1 | reward 0.250 of 4/4 groups with signal | loss +0.2500 | entropy 1.00")
    assert "15 tok/s" in line
    assert "10 tok/s" in progress(changed(num_tokens=30, heldout_s=1.0), 9)
    assert line.endswith("ALARM: it drifts")
    assert "no update" in progress(changed({"updates": (), "entropy": None}), 9)


def test_a_file_of_lines_forgets_steps_that_were_gone_back_on(tmp_path: Path) -> None:
    file = Lines(tmp_path / "metrics.jsonl", StepMetrics)
    assert file.read() == []
    for step in range(4):
        file.append(changed({"step": step}))
    with (tmp_path / "metrics.jsonl").open("ab") as torn:
        torn.write(b'{"type": "rl_st')
    assert [each.report.step for each in file.read()] == [0, 1, 2, 3]
    file.keep(lambda metrics: metrics.report.step < 2)
    assert [each.report.step for each in file.read()] == [0, 1]
    file.append(changed({"step": 2}))
    assert [each.report.step for each in file.read()] == [0, 1, 2]


def test_why_says_where_reward_follows_length(tmp_path: Path) -> None:
    directory = RunDirectory.of(tmp_path, "run")
    directory.root.mkdir(parents=True)
    directory.settings.write_text(RunSettings().model_dump_json())
    directory.metrics.append(HEALTHY)
    for group_id in range(6):
        lengths = [3 + (group_id + place) % 5 for place in range(8)]
        trajectories = [
            make_trajectory(
                [0] * length, group_id=group_id, sample_index=place, reward_parts=(RewardPart("brief", length / 8),)
            )
            for place, length in enumerate(lengths)
        ]
        directory.finished.write(Group(trajectories=tuple(trajectories)))
    page = list(why(tmp_path, "run", None))
    assert any(line.startswith("wrong: sums: longer answers earn more (correlation 1.00") for line in page), page


def audited(**counts: int) -> StepMetrics:
    report = RewardModelReport(num_pairs=3, loss=0.5, audit=Audit(**counts), alarms=("too often",))
    return changed(reward_model=report, lesson_s=0.5)


def test_why_says_where_rule_and_reward_model_disagree_over_all_the_newest_steps(tmp_path: Path) -> None:
    directory = RunDirectory.of(tmp_path, "run")
    directory.root.mkdir(parents=True)
    directory.settings.write_text(RunSettings.build({"reward_model": {}}, source="test").model_dump_json())
    directory.metrics.append(*[audited(num_right=20, num_refused_right=6, num_wrong=20)] * 5)
    page = list(why(tmp_path, "run", None))
    assert (
        "the reward model and the rule disagree on 15% of 200 answers: it accepts 0 wrong ones and refuses 30 right ones"
        in "\n".join(page)
    )
    (told,) = [line for line in page if line.startswith("wrong: ")]
    assert "refuses 30 of 100 answers the rule accepts" in told
    assert "hole in the rule" in told


def test_rare_disagreement_is_told_and_nothing_is_wrong(tmp_path: Path) -> None:
    directory = RunDirectory.of(tmp_path, "run")
    directory.root.mkdir(parents=True)
    directory.settings.write_text(RunSettings.build({"reward_model": {}}, source="test").model_dump_json())
    directory.metrics.append(*[audited(num_right=20, num_refused_right=1, num_wrong=20)] * 5)
    page = "\n".join(why(tmp_path, "run", None))
    assert "disagree on 2% of 200 answers" in page
    assert "nothing is wrong" in page


def test_a_reward_model_without_a_verdict_is_not_said_to_agree(tmp_path: Path) -> None:
    directory = RunDirectory.of(tmp_path, "run")
    directory.root.mkdir(parents=True)
    directory.settings.write_text(RunSettings.build({"reward_model": {}}, source="test").model_dump_json())
    directory.metrics.append(audited())
    page = "\n".join(why(tmp_path, "run", None))
    assert "the reward model has no verdict on any answer: " in page
    assert page.count("reward model without a verdict") == 1
    assert "disagree" not in page
    assert "against the rule" not in page


def test_a_steps_line_tells_of_the_reward_model() -> None:
    line = progress(audited(num_right=10, num_refused_right=2, num_wrong=10), 9)
    assert "reward model 10% against the rule" in line
    assert line.endswith("ALARM: too often")
