from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))

import two_trainers
from tiny_policy import alternating, batch_of, draw_group, make_trainer, weights_of, write_policy

from rl.algorithms.config import AlgorithmSettings
from rl.trainer.batch import make_batch
from rl.trainer.metrics import StepReport
from rl.trainer.packs import make_packs
from rl.trainer.ranks import OneRank
from wire.spec import SCHEMA_VERSION
from wire.target import TargetStore


@pytest.mark.rig
def test_two_ranks_train_as_one_process_does(tmp_path):
    for name in (".", "alone", "together"):
        write_policy(tmp_path / name / "model", tied=True)
    drawn_by = make_trainer(tmp_path / "model")
    batches = [batch_of(drawn_by, step) for step in range(3)]
    pair = draw_group(drawn_by, 3, [4, 5], [3, 4], alternating(), torch.Generator().manual_seed(8))
    batches.append([pair])  # two minibatches of one rollout: nothing for the second rank
    samples = make_batch(batches[0], AlgorithmSettings(), max_output_tokens=16).samples
    packs = make_packs(samples, range(8), two_trainers.PACK_TOKENS, share_prompts=True)
    assert len(packs) == 4  # work for both, in both layouts
    (tmp_path / "batches").write_bytes(msgspec.msgpack.encode(batches))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, two_trainers.__file__, str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    alone = two_trainers.new_trainer(tmp_path, OneRank())
    begin = weights_of(alone)
    reports = two_trainers.train(alone, batches, tmp_path / "alone")
    together = msgspec.json.decode((tmp_path / "together" / "reports").read_bytes(), type=list[StepReport])
    for one, two in zip(reports, together, strict=True):
        for a, b in zip(one.updates, two.updates, strict=True):
            assert (b.loss, b.kl_loss, b.grad_norm) == pytest.approx((a.loss, a.kl_loss, a.grad_norm), rel=1e-4, abs=1e-6)
            assert (b.num_tokens, b.truncated_fraction) == (a.num_tokens, a.truncated_fraction)
            assert a.grad_norm > 0.05  # so that clipping decides the step
        assert two.entropy == pytest.approx(one.entropy, rel=1e-5)
        assert two.consistency.abs_logprob.mean == pytest.approx(one.consistency.abs_logprob.mean, rel=1e-3, abs=1e-6)
        assert two.schema_version == SCHEMA_VERSION
    assert reports[2].updates[0].kl_loss > 0
    found = load_file(tmp_path / "together" / "tensors.safetensors")
    tensors = alone.tensors()
    assert found.keys() == tensors.keys()
    moved = max(float((tensors[f"weight.{name}"] - value).abs().max()) for name, value in begin.items())
    assert moved > 5e-3
    for name, value in tensors.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")
    one, two = (load_file(TargetStore(tmp_path / who).weights(1)) for who in ("alone", "together"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=2e-4)
