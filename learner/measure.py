"""Training throughput on this machine, as JSON: `python -m learner.measure TARGET_DIR [DRAFT_VOCAB_SIZE]`.

Rows are random numbers of the target's shape (speed does not depend on their values), requests are as long as code answers.

Shape letters: T rows, D hidden, X aux layers times D.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

from drafter.batch import RequestRows
from drafter.create import random_draft
from drafter.target import load_target_parts
from learner.config import TrainSettings
from learner.request import CapturedRequest
from learner.trainer import Trainer
from wire.spec import CaptureSpec, resolve_capture_spec

_NUM_PROMPT, _NUM_COMPLETION = 160, 200
_NUM_STEPS = 12


def measure(target_dir: Path, draft_vocab_size: int, settings: TrainSettings) -> tuple[float, float]:
    """Completion tokens per second of CPU time and of wall time, over full steps on one thread, the first ones left out."""
    torch.set_num_threads(1)
    spec = resolve_capture_spec(target_dir, dtype="bfloat16", draft_vocab_size=draft_vocab_size)
    target = load_target_parts(target_dir)
    trainer = Trainer(random_draft(spec, target_dir, target, seed=0), target, settings)
    generator = torch.Generator().manual_seed(0)
    num_requests = -(-settings.batch_tokens // _NUM_COMPLETION)
    requests = [_random_request(spec, number, generator) for number in range(2 * num_requests)]
    for batch in (requests[:num_requests], requests[num_requests:]):
        trainer.step(batch)
    num_tokens = trainer.num_tokens_seen
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    for number in range(_NUM_STEPS):
        trainer.step(requests[:num_requests] if number % 2 else requests[num_requests:])
    num_tokens = trainer.num_tokens_seen - num_tokens
    return num_tokens / (time.process_time() - cpu_s), num_tokens / (time.perf_counter() - wall_s)


def _random_request(spec: CaptureSpec, number: int, generator: torch.Generator) -> CapturedRequest:
    count = _NUM_PROMPT + _NUM_COMPLETION
    rows = RequestRows(
        positions_T=torch.arange(count),
        next_tokens_T=torch.randint(0, spec.vocab_size, (count,), generator=generator),
        aux_TX=torch.randn(count, len(spec.aux_layer_ids) * spec.hidden_size, generator=generator).bfloat16(),
        hidden_TD=torch.randn(count, spec.hidden_size, generator=generator).bfloat16(),
        num_prompt_tokens=_NUM_PROMPT,
        temperature=0.0,
    )
    return CapturedRequest(f"r{number}", f"p{number}", "", "", rows, {}, 0.0)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m learner.measure TARGET_DIR [DRAFT_VOCAB_SIZE]")
    size = int(sys.argv[2]) if len(sys.argv) == 3 else 8192
    settings = TrainSettings(exploding_factor=1e9)
    per_cpu_s, per_wall_s = measure(Path(sys.argv[1]), size, settings)
    found = {"tokens_per_cpu_s": per_cpu_s, "tokens_per_s": per_wall_s, "load_average": os.getloadavg()[0]}
    print(json.dumps({name: round(value, 1) for name, value in found.items()} | {"unroll": settings.unroll}))
