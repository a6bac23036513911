from __future__ import annotations

import json
import resource
from dataclasses import replace

import msgspec
import pytest
import torch

from drafter.credit import Outcome
from learner.archive import RequestArchive
from learner.checkpoint import Progress, load_checkpoint, save_checkpoint
from learner.history import History


@pytest.fixture
def progress(spec):
    return Progress(
        spec=spec,
        num_steps=5,
        num_tokens_seen=100,
        num_tokens_distinct=40,
        num_published=1,
        num_restores=0,
        num_gate_decisions={"accepted": 1},
        visits={"k": 2},
    )


def test_checkpoint_round_trips(tmp_path, spec, progress):
    tensors = {"core.a": torch.randn(3, 4), "optimiser.step": torch.tensor(7.0)}
    save_checkpoint(tmp_path / "c.safetensors", tensors, progress)
    loaded = load_checkpoint(tmp_path / "c.safetensors", spec)
    assert loaded is not None
    assert loaded[1] == progress
    assert all(torch.equal(loaded[0][name], value) for name, value in tensors.items())
    assert [path.name for path in tmp_path.glob("c.*")] == ["c.safetensors"]


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])
def test_a_damaged_checkpoint_starts_anew(tmp_path, spec, content):
    (tmp_path / "c.safetensors").write_bytes(content)
    assert load_checkpoint(tmp_path / "c.safetensors", spec) is None


def test_a_checkpoint_of_another_target_starts_anew(tmp_path, spec, progress):
    save_checkpoint(tmp_path / "c.safetensors", {"a": torch.zeros(1)}, progress)
    assert load_checkpoint(tmp_path / "c.safetensors", msgspec.structs.replace(spec, target_revision="other")) is None
    assert load_checkpoint(tmp_path / "absent.safetensors", spec) is None


def test_a_failed_write_keeps_the_old_checkpoint(tmp_path, spec, progress):
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, {"a": torch.zeros(1)}, progress)
    path.with_suffix(".tmp").mkdir()
    with pytest.raises(OSError, match="directory"):
        save_checkpoint(path, {"a": torch.ones(1)}, progress)
    loaded = load_checkpoint(path, spec)
    assert loaded is not None
    assert loaded[0]["a"] == 0


def test_archived_request_comes_back_whole(tmp_path, make_request, spec):
    request = replace(make_request(), outcomes={3: Outcome((1, 2), 1, 4)})
    archive = RequestArchive(tmp_path, spec)
    archive.write(request)
    (read,) = archive.read_all()
    assert (read.key, read.prompt_key, read.group, read.outcomes) == (
        request.key,
        request.prompt_key,
        request.group,
        request.outcomes,
    )
    for name in ("positions_T", "next_tokens_T", "aux_TX", "hidden_TD"):
        assert torch.equal(getattr(read.rows, name), getattr(request.rows, name))
    archive.remove(request.key)
    assert list(archive.read_all()) == []


def test_damaged_and_foreign_files_are_removed(tmp_path, make_request, spec):
    archive = RequestArchive(tmp_path, spec)
    archive.write(make_request("a"))
    RequestArchive(tmp_path, msgspec.structs.replace(spec, target_revision="other")).write(make_request("b"))
    (tmp_path / "broken.safetensors").write_bytes(b"x")
    (tmp_path / "left.tmp").write_bytes(b"x")
    assert [request.key for request in archive.read_all()] == ["a"]
    assert len(list(tmp_path.glob("*.*"))) == 1


def test_an_unwritable_archive_is_counted_not_raised(tmp_path, make_request, spec):
    (tmp_path / "file").write_text("")
    archive = RequestArchive(tmp_path / "file", spec)
    archive.write(make_request())
    assert archive.num_write_errors == 1


def test_history_is_one_json_object_a_line(tmp_path):
    history = History(tmp_path / "learner")
    history.write("step", loss=1.5)
    history.write("gate", outcome="rejected")
    lines = [json.loads(line) for line in (tmp_path / "learner" / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["step", "gate"]
    assert lines[0]["loss"] == 1.5


def test_a_disk_that_fills_up_within_a_line_of_history_leaves_whole_lines(tmp_path):
    history = History(tmp_path)
    history.write("step", loss=1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 5, hard))
    try:
        history.write("step", loss=2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    history.write("step", loss=3.0)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [1.0, 3.0]


def test_an_unwritable_history_is_not_raised(tmp_path):
    (tmp_path / "file").write_text("")
    History(tmp_path / "file").write("step")


@pytest.mark.parametrize(
    "changes",
    [
        {"aux_TX": torch.full((16, 48), float("nan"))},
        {"hidden_TD": torch.zeros(16, 8)},
        {"hidden_TD": torch.zeros(16, 16, dtype=torch.float16)},
        {"next_tokens_T": torch.full((16,), 64)},
        {"next_tokens_T": torch.zeros(9, dtype=torch.int64)},
        {"positions_T": torch.zeros(16, dtype=torch.int64)},
        {"positions_T": torch.arange(16) - 1},
        {"positions_T": torch.arange(16.0)},
        {"num_prompt_tokens": -4},
    ],
)
def test_an_archived_request_training_could_not_use_is_removed(tmp_path, make_request, spec, changes):
    request = make_request("bad")
    archive = RequestArchive(tmp_path, spec)
    archive.write(replace(request, rows=replace(request.rows, **changes)))
    archive.write(make_request("good"))
    assert [read.key for read in archive.read_all()] == ["good"]
    assert len(list(tmp_path.glob("*.*"))) == 1


@pytest.mark.parametrize("outcome", [Outcome((64,), 0, 0), Outcome((1,), 2, 0), Outcome((1,), -1, 0)])
def test_an_archived_outcome_that_is_impossible_is_removed(tmp_path, make_request, spec, outcome):
    archive = RequestArchive(tmp_path, spec)
    archive.write(replace(make_request(), outcomes={3: outcome}))
    assert list(archive.read_all()) == []


def test_directories_named_like_files_are_passed_over(tmp_path, make_request, spec):
    archive = RequestArchive(tmp_path, spec)
    archive.write(make_request("a"))
    (tmp_path / "d.safetensors").mkdir()
    (tmp_path / "d.tmp").mkdir()
    (tmp_path / "dangling.safetensors").symlink_to(tmp_path / "absent")
    assert [request.key for request in archive.read_all()] == ["a"]


def test_a_checkpoint_that_is_not_finite_starts_anew(tmp_path, spec, progress):
    save_checkpoint(tmp_path / "c.safetensors", {"a": torch.tensor([1.0, float("nan")])}, progress)
    assert load_checkpoint(tmp_path / "c.safetensors", spec) is None
