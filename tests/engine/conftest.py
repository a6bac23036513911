"""Live engines for the tests: one with the tiny model and one with the real model, each started once a session, eager, fp32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from live_engine import LiveEngine, start_engine

from drafter.create import create_random_draft
from launch.models import resolve
from wire.spec import resolve_capture_spec
from wire.store import DraftStore


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_target(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_state(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory with three random drafts; 0 is active."""
    state_dir = tmp_path_factory.mktemp("tiny-state")
    make_drafts(state_dir, tiny_target, draft_vocab_size=tiny.DRAFT_VOCAB, count=3)
    return state_dir


@pytest.fixture(scope="session")
def tiny_engine(tiny_target: Path, tiny_state: Path) -> Iterator[LiveEngine]:
    """Few KV blocks and a small token budget: long prompts are chunked, and many requests preempt one another.

    Draft 1 is active when it starts, and draft 0 is activated while it loads.
    """
    DraftStore(tiny_state).set_active(1)
    options = ["--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--num-gpu-blocks-override", "34"]
    worker = "probe_worker.ProbeCpuWorker"
    variables = {"PROBE_ACTIVATE_WHILE_LOADING": "0"}
    with start_engine(
        tiny_target, tiny_state, tiny.DRAFT_VOCAB, options=options, worker_cls=worker, variables=variables
    ) as engine:
        engine.digests_at_start = engine.ok("/paceline/digest")
        yield engine


@pytest.fixture(scope="session")
def real_target() -> Path:
    return resolve("smollm2-135m-instruct", lambda *_: None)


@pytest.fixture(scope="session")
def real_engine(real_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    state_dir = tmp_path_factory.mktemp("real-state")
    make_drafts(state_dir, real_target, draft_vocab_size=8192, count=2)
    with start_engine(real_target, state_dir, 8192, options=["--max-num-seqs", "16"]) as engine:
        yield engine


def make_drafts(state_dir: Path, target_dir: Path, *, draft_vocab_size: int, count: int) -> None:
    store = DraftStore(state_dir)
    spec = resolve_capture_spec(target_dir, dtype="float32", draft_vocab_size=draft_vocab_size)
    versions = [create_random_draft(store, spec, target_dir, seed=seed) for seed in range(count)]
    store.set_active(versions[0])
