"""The learner role as two processes under torchrun, with a fake engine and a fake gateway."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import psutil
import pytest
import torch
from waiting import wait_until

from learner.checkpoint import load_checkpoint
from learner.config import LearnerConfig
from learner.processes import run_rank
from learner.session import LearningSession
from wire.errors import ConfigError
from wire.store import DraftStore

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def config(state_dir, target_dir, gateway):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def build(num_processes: int) -> LearnerConfig:
        data = {
            "learner": {
                "num_processes": num_processes,
                "nice": 0,
                "checkpoint_every_s": 0.2,
                "replay": {"holdout_share": 0.3, "max_passes": 10_000},
                "train": {"muon_rate": 0.05, "bfloat16": False, "batch_tokens": 60},
                "gate": {"every_s": 0.2, "num_resamples": 200},
            },
            "target_dir": str(target_dir),
            "state_dir": str(state_dir),
            "capture_endpoint": f"tcp://127.0.0.1:{port}",
            "admin_url": gateway.url,
            "num_speculative_tokens": 3,
        }
        return LearnerConfig.build(data, source="test")

    return build


@pytest.fixture
def start(config, tmp_path):
    """Starts the learner on two processes; whatever is left of it at the end is killed."""
    started: list[psutil.Popen] = []

    def run() -> psutil.Popen:
        path = tmp_path / "learner.json"
        path.write_text(config(2).model_dump_json())
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [sys.executable, *launcher, "-m", "launch.cli", "learn", "--resolved", str(path)]
        with (tmp_path / "learner.log").open("ab") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
            started.append(psutil.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path))
        return started[-1]

    yield run
    for process in started:
        if process.is_running():
            process.kill()


def ranks_of(process: psutil.Popen) -> list[psutil.Process]:
    """Leader first."""
    children = [child for child in process.children() if "learn" in child.cmdline()]
    return sorted(children, key=lambda child: int(child.environ()["RANK"]))


def test_two_processes_learn_publish_die_together_and_go_on(start, config, gateway, connect_engine, state_dir):
    process = start()
    engine = connect_engine(config(2).capture_endpoint)
    numbers = count()

    def a_better_draft_serves_the_next_request() -> bool:
        n = next(numbers)
        engine.serve(f"r{n}", first=n, prompt=3 + n % 5, total=24)
        time.sleep(0.1)  # the traffic's pace
        return gateway.store.active() != 0

    wait_until(a_better_draft_serves_the_next_request)
    assert gateway.store.verify(gateway.store.active()).gate.candidate_al > 1

    ranks = ranks_of(process)
    assert len(ranks) == 2
    ranks[1].kill()
    assert process.wait(timeout=120) != 0
    assert psutil.wait_procs(ranks, timeout=10)[1] == []

    spec = DraftStore(state_dir).manifest(0).spec
    path = state_dir / "learner" / "checkpoint.safetensors"
    num_steps = load_checkpoint(path, spec)[1].num_steps
    assert num_steps > 0
    reports = len(gateway.reports)
    process = start()
    wait_until(lambda: any(report["num_steps"] > num_steps for report in gateway.reports[reports:]))
    ranks = ranks_of(process)
    process.terminate()
    process.wait(timeout=120)
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
    tensors, progress = load_checkpoint(path, spec)
    assert progress.num_steps > num_steps

    session = LearningSession(config(1), DraftStore(state_dir).active())
    assert session.origin == f"its checkpoint at step {progress.num_steps}"
    assert torch.equal(session.trainer.core.fc.weight, tensors["core.fc.weight"])
    session.close()


def test_processes_that_nobody_started_are_asked_for(config, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="torchrun"):
        run_rank(config(2), lambda *_: 0)


def test_one_process_does_not_load_what_several_need():
    code = "import sys, learner.main; print([name for name in sys.modules if name in ('learner.sharded', 'learner.processes')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr
