from __future__ import annotations

import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import tiny_policy
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tiny_policy import CANARY_IDS, batch_of, make_sink, make_trainer, model_of, weights_of, write_policy
from waiting import wait_until

from rl.generator.state import GeneratorState, OpenGroup, OpenRollout, PartialTurn
from rl.staleness.ledger import Ledger, LedgerState
from rl.trainer.checkpoint import Checkpoints
from rl.trainer.dumps import Dumps, replay
from wire.errors import ArtifactError, TrainerError
from wire.spec import SCHEMA_VERSION, weights_revision


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_policy(tmp_path / "model")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def copied(trainer):
    return {name: tensor.clone() for name, tensor in trainer.tensors().items()}


@contextmanager
def full_disk():
    """Files end at 8 kB, which fails a write the way a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.rig
def test_a_killed_run_goes_on_as_if_it_had_not_been_killed(tmp_path, model_dir):
    program = subprocess.Popen([sys.executable, tiny_policy.__file__, str(tmp_path)])
    checkpoints = Checkpoints(tmp_path / "checkpoints", num_kept=2)
    try:
        wait_until(lambda: checkpoints.steps() and checkpoints.steps()[-1] >= 3, "for three checkpoints")
    finally:
        program.kill()
        program.wait()
    resumed = make_trainer(model_dir, **tiny_policy.PROGRAM_SETTINGS)
    progress = checkpoints.restore(resumed)
    assert progress is not None
    assert progress.ledger.version == resumed.num_steps - 1

    never_killed = make_trainer(model_dir, **tiny_policy.PROGRAM_SETTINGS)
    for step in range(resumed.num_steps):
        never_killed.step(batch_of(never_killed, step))
    assert same(resumed.tensors(), never_killed.tensors())
    step = resumed.num_steps
    assert resumed.step(batch_of(resumed, step)) == never_killed.step(batch_of(never_killed, step))
    assert same(resumed.tensors(), never_killed.tensors())


def test_a_checkpoint_holds_the_ledger_and_the_groups_that_wait(tmp_path, model_dir):
    trainer = make_trainer(model_dir)
    trainer.version = 4
    ledger = Ledger(LedgerState(version=4), eta=1, groups_per_version=2)
    groups = batch_of(trainer, 0)
    for group in groups:
        ledger.submit(group.environment, group.environment_seed)
        assert ledger.finish(group)
    checkpoints = Checkpoints(tmp_path / "checkpoints", num_kept=1)
    rollout = OpenRollout(sample_index=0, submitted_s=1.0, partial=PartialTurn(prompt_token_ids=(1, 2)))
    generator = GeneratorState(groups=(OpenGroup(group_id=9, temperature=0.8, rollouts=(rollout,)),))
    checkpoints.save(trainer, ledger.state, groups, b"a reward model", generator)
    progress = checkpoints.restore(make_trainer(model_dir))
    assert progress is not None
    assert progress.ledger == ledger.state
    assert list(progress.waiting) == groups
    assert progress.rewards == b"a reward model"
    assert progress.generator == generator
    assert (progress.version, progress.num_steps) == (4, 0)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, model_dir):
    trainer = make_trainer(model_dir)
    checkpoints = Checkpoints(tmp_path / "checkpoints", num_kept=2)
    assert checkpoints.restore(trainer) is None
    states = []
    for step in range(4):
        trainer.step(batch_of(trainer, step))
        checkpoints.save(trainer, LedgerState(version=0))
        states.append(copied(trainer))
    assert checkpoints.steps() == [3, 4]
    newest = checkpoints.path(4)
    newest.write_bytes(newest.read_bytes()[:-1000])
    resumed = make_trainer(model_dir)
    checkpoints.restore(resumed)
    assert resumed.num_steps == 3
    assert same(resumed.tensors(), states[2])
    checkpoints.path(3).write_bytes(b"")
    with pytest.raises(TrainerError, match="begin anew"):
        checkpoints.restore(resumed)


def test_a_checkpoint_of_another_model_is_refused_and_moves_nothing(tmp_path, model_dir):
    tied = make_trainer(write_policy(tmp_path / "tied", tied=True))
    checkpoints = Checkpoints(tmp_path / "checkpoints", num_kept=1)
    checkpoints.save(tied, LedgerState(version=0))
    trainer = make_trainer(model_dir)
    before = copied(trainer)
    with pytest.raises(TrainerError, match=r"lm_head\.weight"):
        checkpoints.restore(trainer)
    assert same(trainer.tensors(), before)


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, model_dir):
    trainer = make_trainer(model_dir)
    checkpoints = Checkpoints(tmp_path / "checkpoints", num_kept=1)
    checkpoints.save(trainer, LedgerState(version=0))
    trainer.step(batch_of(trainer, 0))
    with full_disk(), pytest.raises(OSError, match="cannot write"):
        checkpoints.save(trainer, LedgerState(version=0))
    assert [path.name for path in checkpoints.directory.iterdir()] == ["0.safetensors"]


def test_a_full_disk_leaves_no_version(tmp_path, model_dir):
    trainer = make_trainer(model_dir)
    sink = make_sink(tmp_path, model_dir)
    with full_disk(), pytest.raises(OSError, match="target 1"):
        trainer.publish(sink)
    assert list(sink.store.root.iterdir()) == []
    assert trainer.version == 0
    assert trainer.publish(sink) == 1
    assert [path.name for path in sink.store.root.iterdir()] == ["1"]


def test_a_step_is_made_again_from_disk(tmp_path, model_dir):
    trainer = make_trainer(model_dir, num_minibatches=2)
    checkpoints = Checkpoints(tmp_path / "checkpoints", num_kept=2)
    dumps = Dumps(tmp_path / "dumps", num_kept=4)
    states = []
    for step in range(6):
        if step in (2, 4):
            checkpoints.save(trainer, LedgerState(version=trainer.version))
        groups = batch_of(trainer, step)
        dumps.write(trainer, groups)
        dumps.write_report(trainer.step(groups))
        states.append(copied(trainer))
        trainer.version += 1  # as a publication would
    assert dumps.steps() == [2, 3, 4, 5]
    for step in (3, 5):
        again = make_trainer(model_dir, num_minibatches=2)
        assert replay(again, checkpoints, dumps, step) == dumps.report(step)
        assert same(again.tensors(), states[step])
    with pytest.raises(TrainerError, match=r"batches \[0, 1\] are"):
        replay(make_trainer(model_dir, num_minibatches=2), checkpoints, dumps, 1)


def test_a_run_that_went_back_keeps_what_it_writes_and_forgets_what_it_went_back_on(tmp_path, model_dir):
    trainer = make_trainer(model_dir)
    checkpoints, dumps = Checkpoints(tmp_path / "checkpoints", num_kept=1), Dumps(tmp_path / "dumps", num_kept=2)
    groups = batch_of(trainer, 0)
    for step in (7, 8, 2):
        trainer.num_steps = step
        dumps.write(trainer, groups)
        if step > 2:
            dumps.write_report(trainer.step(groups))
            checkpoints.save(trainer, LedgerState(version=0))
    assert dumps.steps() == [2]
    assert [path.name for path in dumps.directory.iterdir()] == ["2.batch"]
    assert checkpoints.steps() == [9]
    checkpoints.save(trainer, LedgerState(version=0))
    assert checkpoints.steps() == [2]
    assert {path.name for path in checkpoints.directory.iterdir()} == {"2.safetensors", "9.superseded"}


def test_the_report_of_a_step_that_was_left_out_comes_back_from_disk(tmp_path, model_dir):
    trainer = make_trainer(model_dir)
    groups = batch_of(trainer, 0)
    with torch.no_grad():
        trainer.policy.model.lm_head.weight.fill_(float("nan"))
    dumps = Dumps(tmp_path / "dumps", num_kept=1)
    dumps.write(trainer, groups)
    report = trainer.step(groups)
    assert report.updates[0].loss is None
    dumps.write_report(report)
    assert dumps.report(0) == report
    batch = dumps.batch(0)
    (dumps.directory / "0.json").write_bytes(msgspec.json.encode(replace(report, schema_version=SCHEMA_VERSION + 1)))
    (dumps.directory / "0.batch").write_bytes(msgspec.msgpack.encode(replace(batch, schema_version=SCHEMA_VERSION + 1)))
    for read in (dumps.report, dumps.batch):
        with pytest.raises(TrainerError, match=f"of schema {SCHEMA_VERSION + 1}"):
            read(0)


@pytest.mark.parametrize("tied", [False, True])
def test_a_published_version_is_the_policy_as_others_read_it(tmp_path, tied):
    model_dir = write_policy(tmp_path / "model", tied=tied)
    trainer = make_trainer(model_dir)
    sink = make_sink(tmp_path, model_dir)
    for step in range(2):
        trainer.step(batch_of(trainer, step))
        assert trainer.publish(sink) == step + 1
    assert sink.store.versions() == [1, 2]
    manifest = sink.store.verify(2)
    assert (manifest.target_id, manifest.base_revision) == ("model", weights_revision(model_dir))
    assert manifest.num_steps == 2
    assert load_file(sink.store.weights(2)).keys() == load_file(model_dir / "model.safetensors").keys()
    again = make_trainer(model_of(sink, 2, model_dir, tmp_path / "again"), learning_rate=0.0)
    assert same(weights_of(again), weights_of(trainer))
    again.version = trainer.version
    assert again.step(batch_of(trainer, 7)).alarms == ()


def test_a_version_has_the_very_tensors_of_the_models_files(tmp_path):
    model_dir = write_policy(tmp_path / "model", tied=True)
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    extra = torch.arange(4.0)
    stored = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone(), "rotary.inv_freq": extra}
    save_file(stored, path, metadata={"format": "pt"})
    trainer = make_trainer(model_dir)
    trainer.step(batch_of(trainer, 0))
    sink = make_sink(tmp_path, model_dir)
    written = load_file(sink.store.weights(trainer.publish(sink)))
    assert written.keys() == stored.keys()
    assert torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])
    assert not torch.equal(written["lm_head.weight"], stored["lm_head.weight"])
    assert torch.equal(written["rotary.inv_freq"], extra)


def test_a_version_carries_what_the_policy_says_of_its_canary(tmp_path, model_dir):
    trainer = make_trainer(model_dir)
    trainer.step(batch_of(trainer, 0))
    sink = make_sink(tmp_path, model_dir)
    canary = sink.store.manifest(trainer.publish(sink)).canary
    with torch.no_grad():
        logprobs_LV = trainer.policy.model(input_ids=torch.tensor([CANARY_IDS])).logits[0].log_softmax(-1)
    expected = [float(logprobs_LV[at, token]) for at, token in enumerate(CANARY_IDS[1:])]
    assert canary.token_ids == CANARY_IDS
    assert canary.logprobs == pytest.approx(expected, rel=1e-5)
    assert canary.mean_error(expected) < canary.max_mean_error


def test_a_policy_that_is_not_finite_is_no_version(tmp_path, model_dir):
    trainer = make_trainer(model_dir)
    with torch.no_grad():
        trainer.policy.model.lm_head.weight.fill_(float("nan"))
    sink = make_sink(tmp_path, model_dir)
    with pytest.raises(TrainerError, match="not all finite"):
        trainer.publish(sink)
    assert sink.store.versions() == []


def test_a_version_is_written_in_the_engines_dtype(tmp_path, model_dir):
    trainer = make_trainer(model_dir, dtype="bfloat16")
    report = trainer.step(batch_of(trainer, 0))
    assert report.updates[0].skipped is None
    sink = make_sink(tmp_path, model_dir, dtype="bfloat16")
    written = load_file(sink.store.weights(trainer.publish(sink)))
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in trainer.policy.parameters().values()} == {torch.float32}


def test_an_altered_version_is_found_out(tmp_path, model_dir):
    trainer = make_trainer(model_dir)
    sink = make_sink(tmp_path, model_dir)
    trainer.publish(sink)
    path = sink.store.weights(1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"model\.safetensors"):
        sink.store.verify(1)


def test_old_versions_go_and_the_active_one_and_its_parent_stay(tmp_path, model_dir):
    trainer = make_trainer(model_dir)
    sink = make_sink(tmp_path, model_dir)
    for version in range(1, 6):
        trainer.num_updates += 1
        assert trainer.publish(sink) == version
        if version <= 3:
            sink.store.set_active(version)
    assert [sink.store.manifest(version).parent for version in (1, 2, 3, 4, 5)] == [0, 1, 2, 3, 3]
    assert sink.prune(1) == [1, 4]
    assert sink.store.versions() == [2, 3, 5]


def test_versions_count_up(tmp_path, model_dir):
    trainer = make_trainer(model_dir)
    trainer.version = 3
    with pytest.raises(TrainerError, match="count up"):
        trainer.publish(make_sink(tmp_path, model_dir))
