"""Publishes a draft under a limit on the size of files, which fails a write the way a full disk does; prints what became of it."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from drafter.create import random_draft
from drafter.target import load_target_parts
from learner.admin import AdminClient
from learner.config import GateSettings
from learner.evaluate import Evaluator
from learner.publisher import Publisher
from wire.artifact import GateReport, TrainingReport
from wire.store import DraftStore

_LIMIT_BYTES = 4096


def main(target_dir: Path, state_dir: Path) -> None:
    store, target = DraftStore(state_dir), load_target_parts(target_dir)
    spec = store.manifest(0).spec
    evaluator = Evaluator(target, 3, dtype=torch.float32, max_context_rows=64)
    client = AdminClient("http://127.0.0.1:9")
    publisher = Publisher(store, client, evaluator, spec=spec, target=target, settings=GateSettings(), keep_versions=2)
    draft = random_draft(spec, target_dir, target, seed=1)
    training = TrainingReport(num_steps=1, num_tokens_seen=1, num_tokens_distinct=1, loss=1.0, seed=0)
    gate = GateReport(accepted=True, reason="", candidate_al=2.0, incumbent_al=1.0, gain_low=0.5, gain_high=1.5, num_requests=8)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LIMIT_BYTES, _LIMIT_BYTES))
    print(publisher._publish(draft, training, gate, 0)[1], publisher.last_outcome, sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
