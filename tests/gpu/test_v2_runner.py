"""The V2 model runner, CUDA's default, live: the same claims as on the CPU. Skipped without a GPU.

Run with paceline[cuda] installed: `python -m pytest tests/gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from live_engine import LiveEngine, start_engine

from drafter.create import create_random_draft
from wire.spec import resolve_capture_spec
from wire.store import DraftStore

pytestmark = [pytest.mark.gpu]
PROMPTS = [f"def function_{i}(x):\n    return" for i in range(6)]


@pytest.fixture(scope="module")
def gpu_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    if not Path("/dev/nvidiactl").exists():
        pytest.skip("no NVIDIA device on this machine")
    target = tiny.make_target(tmp_path_factory.mktemp("models") / "tiny")
    state_dir = tmp_path_factory.mktemp("gpu-state")
    store = DraftStore(state_dir)
    spec = resolve_capture_spec(target, dtype="float32", draft_vocab_size=tiny.DRAFT_VOCAB)
    for seed in range(2):
        create_random_draft(store, spec, target, seed=seed)
    store.set_active(0)
    worker = "server.engine.worker_gpu.PacelineGpuWorker"
    with start_engine(target, state_dir, tiny.DRAFT_VOCAB, options=["--max-num-seqs", "8"], worker_cls=worker) as engine:
        yield engine


def test_the_v2_adapter_is_in_use(gpu_engine: LiveEngine) -> None:
    assert [worker["runner"] for worker in gpu_engine.ok("/paceline/status")["workers"]] == ["v2"]


def test_counts_equal_vllms_own(gpu_engine: LiveEngine) -> None:
    completions = gpu_engine.complete_all(PROMPTS)
    gpu_engine.settle()
    for completion in completions:
        spans = [span for _, span in gpu_engine.spans_of(completion) if span.num_proposed]
        assert [span.num_accepted for span in spans] == completion.metrics["speculative_decoding"]["per_step_accepted"]


def test_captured_positions_are_those_of_the_text_though_proposals_are_rejected(gpu_engine: LiveEngine) -> None:
    completions = gpu_engine.complete_all(PROMPTS)
    gpu_engine.settle()
    for completion in completions:
        seen = gpu_engine.tokens_by_position(completion)
        assert [seen[position] for position in range(min(seen), len(completion.ids))] == completion.ids[min(seen) :]


def test_a_swap_and_a_change_of_depth_leave_the_text_as_it_was(gpu_engine: LiveEngine) -> None:
    gpu_engine.set_depth(0)
    reference = [completion.token_ids for completion in gpu_engine.complete_all(PROMPTS)]
    gpu_engine.set_depth(3)
    gpu_engine.swap(1)
    assert [completion.token_ids for completion in gpu_engine.complete_all(PROMPTS)] == reference


def test_depth_by_batch_size_is_in_force_and_its_steps_are_timed(gpu_engine: LiveEngine) -> None:
    by_size = [3, 2, 2, 1, 1, 0, 0, 0]
    reference = [completion.token_ids for completion in gpu_engine.complete_all(PROMPTS[:4], max_tokens=128)]
    try:
        assert gpu_engine.ok("/paceline/depth", {"depth": by_size}) == {"depths": by_size}
        assert [completion.token_ids for completion in gpu_engine.complete_all(PROMPTS[:4], max_tokens=128)] == reference
    finally:
        gpu_engine.set_depth(3)
    timed = {(each.bucket, each.depth): each for each in gpu_engine.fresh_stats().step_times}
    assert timed[4, 1].num_steps > 10
    assert 0.0 < timed[4, 1].total_s / timed[4, 1].num_steps < 1.0
