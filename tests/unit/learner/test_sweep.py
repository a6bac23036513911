from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import learner.sweep
from drafter.artifact import write_draft_files
from drafter.create import random_draft
from learner.archive import RequestArchive
from learner.config import TrainSettings
from learner.request import is_held_out
from learner.sweep import main, read_sweep

SHARE = 0.25
SWEEPS = Path(learner.sweep.__file__).parent / "sweeps"


@pytest.fixture
def archive(tmp_path, spec, make_request):
    """A learner's requests on disk, written in another order than they were captured in."""
    directory = tmp_path / "requests"
    kept = RequestArchive(directory, spec)
    requests = [replace(make_request(f"k{n}", first=n, prompt_key=f"p{n}"), captured_at_s=float(n)) for n in range(24)]
    for request in reversed(requests):
        kept.write(request)
    return directory


@pytest.fixture
def sweep(tmp_path, target_dir, archive, capsys):
    """Runs a sweep over the settings of a TOML text; returns (status, judgements, what was printed)."""

    def run(settings: str, top: str = "token_visits = 500"):
        path, out = tmp_path / "sweep.toml", tmp_path / "results.jsonl"
        path.write_text(f"""
            target = "{target_dir}"
            dtype = "float32"
            draft_vocab_size = 48
            aux_layer_ids = [1, 3, 5]
            judge_every = 200
            {top}
            [replay]
            holdout_share = {SHARE}
            [train]
            muon_rate = 0.05
            bfloat16 = false
            batch_tokens = 40
            {settings}
        """)
        out.unlink(missing_ok=True)
        status = main([str(path), "--requests", str(archive), "--out", str(out)])
        points = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        return status, points, capsys.readouterr()

    return run


def test_settings_are_judged_at_the_same_visits_from_the_same_start(sweep):
    status, points, printed = sweep("""
        [[setting]]
        name = "kl"
        [[setting]]
        name = "again"
        [[setting]]
        name = "adamw"
        train = { muon_rate = 0.0, objective = "lk" }
    """)
    assert status == 0
    by_name = {name: [point for point in points if point["setting"] == name] for name in ("kl", "again", "adamw")}
    same = ("num_steps", "num_tokens_seen", "num_tokens_distinct", "simulated_al", "kl")
    assert [[point[key] for key in same] for point in by_name["kl"]] == [
        [point[key] for key in same] for point in by_name["again"]
    ]
    visits = [point["num_tokens_seen"] for point in by_name["kl"]]
    assert visits == [point["num_tokens_seen"] for point in by_name["adamw"]]
    assert visits[0] == 0
    assert 200 <= visits[1] < 400 <= visits[2] < 500 <= visits[3] < 560
    assert by_name["adamw"][0]["simulated_al"] == by_name["kl"][0]["simulated_al"]
    assert by_name["adamw"][-1]["kl"] != by_name["kl"][-1]["kl"]
    assert "again over kl at the end: +0.000 AL" in printed.out


def test_a_setting_that_diverges_is_told_and_the_others_go_on(sweep):
    status, points, printed = sweep("""
        [[setting]]
        name = "wild"
        train = { muon_rate = 1e30 }
        [[setting]]
        name = "kl"
    """)
    assert status == 0
    assert "diverged" in printed.out
    assert [point["num_tokens_seen"] for point in points if point["setting"] == "wild"] == [0]
    assert points[-1]["setting"] == "kl"
    assert points[-1]["num_tokens_seen"] >= 500


def test_a_setting_may_start_from_a_checkpoint(sweep, spec, target_dir, target, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    write_draft_files(tmp_path / "checkpoint", random_draft(spec, target_dir, target, seed=7))
    _, points, _ = sweep(f"""
        [[setting]]
        name = "seed"
        train = {{ seed = 7 }}
        [[setting]]
        name = "checkpoint"
        start = "{tmp_path / "checkpoint"}"
        train = {{ seed = 7 }}
    """)
    seed, checkpoint = ([point["kl"] for point in points if point["setting"] == name] for name in ("seed", "checkpoint"))
    assert checkpoint == pytest.approx(seed)


def test_training_raises_the_judged_al(sweep):
    top, settings = "token_visits = 20000", "[[setting]]\nname = 'kl'\nreplay = { max_passes = 100 }\nvisits_per_token = 90"
    _, points, _ = sweep(settings, top)
    assert points[-1]["simulated_al"] > points[0]["simulated_al"] + 0.3
    assert points[-1]["kl"] < points[1]["kl"] / 2


def test_requests_arrive_as_training_goes_on_and_held_out_ones_never(sweep, make_request):
    _, points, _ = sweep(
        "[[setting]]\nname = 'slow'\nvisits_per_token = 2.0\n[[setting]]\nname = 'fast'\nvisits_per_token = 50.0"
    )
    tokens = make_request().num_tokens
    total = tokens * sum(not is_held_out(f"p{n}", SHARE) for n in range(24))
    slow, fast = ([point for point in points[1:] if point["setting"] == name] for name in ("slow", "fast"))
    for point in slow:
        assert point["num_tokens_distinct"] <= point["num_tokens_seen"] / 2.0 + tokens
    assert 0 < slow[0]["num_tokens_distinct"] < total
    assert slow[-1]["num_tokens_distinct"] == total
    assert fast[-1]["num_tokens_distinct"] < total  # max_passes over the first requests take all the visits


def test_the_archive_stays_as_it_is(sweep, archive):
    (archive / "damaged.safetensors").write_bytes(b"not a request")
    (archive / "half.tmp").write_bytes(b"half")
    before = {path.name: path.read_bytes() for path in archive.iterdir()}
    status, _, _ = sweep("[[setting]]\nname = 'kl'")
    assert status == 0
    assert {path.name: path.read_bytes() for path in archive.iterdir()} == before


@pytest.mark.parametrize("path", sorted(SWEEPS.glob("*.toml")), ids=lambda path: path.name)
def test_sweeps_that_come_with_the_learner_are_valid(path):
    sweep = read_sweep(path, ["target=/some/target"])
    assert len(sweep.settings) > 1
    assert sweep.settings[0].train == TrainSettings()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("", "settings"),
        ("[[setting]]\nname = 'a'\n[[setting]]\nname = 'a'", "same name"),
        ("[[setting]]\nname = 'a'\n[[setting]]\nname = 'b'\nreplay = { holdout_share = 0.5 }", "holdout_share"),
        ("[[setting]]\nname = 'a'\ntrain = { hard_weight = 0.9 }", "belongs to objective"),
        ("[[setting]]\nname = 'a'\nspeed = 1", "unknown key"),
        ("[[setting]]\nname = 'a'\nreplay = { holdout_share = 0.0001 }", "0 to judge by"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(sweep, settings, says):
    status, points, printed = sweep(settings)
    assert status == 1
    assert says in printed.err
    assert points == []
