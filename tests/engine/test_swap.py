"""Swaps in a live engine: atomic, exact, refused where unsafe, rolled back where they fail half-way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from live_engine import LiveEngine
from safetensors.numpy import load_file, save_file

from wire.artifact import MANIFEST_FILE, WEIGHTS_FILE
from wire.spec import file_sha256
from wire.store import DraftStore

PROMPTS = [f"swap prompt {i}: " for i in range(8)]


@pytest.fixture(autouse=True)
def draft_zero_is_active(tiny_engine: LiveEngine) -> None:
    if tiny_engine.active() != 0:
        tiny_engine.swap(0)


def test_a_draft_activated_while_an_engine_loads_is_the_one_it_starts_with(tiny_engine: LiveEngine, tiny_state: Path) -> None:
    """As `tiny_engine` was started: what it loaded is that draft, whole, as it is after a swap."""
    assert DraftStore(tiny_state).active() == 0
    at_start = tiny_engine.digests_at_start["draft"]
    tiny_engine.swap(1)
    assert tiny_engine.ok("/paceline/digest")["draft"] != at_start
    tiny_engine.swap(0)
    assert tiny_engine.ok("/paceline/digest")["draft"] == at_start


def test_swaps_under_load_leave_every_token_as_it_was(tiny_engine: LiveEngine) -> None:
    """Against no speculation in the same engine; fp32, so exact at any batch size."""
    tiny_engine.set_depth(0)
    reference = tiny_engine.complete_all(PROMPTS, max_tokens=120)
    tiny_engine.set_depth(3)
    for version in (1, 2):
        tiny_engine.stage(version)
    digest = tiny_engine.ok("/paceline/digest")["target"]

    def swap_five_times() -> None:
        for number in range(5):
            tiny_engine.commit(1 + number % 2)

    with ThreadPoolExecutor(max_workers=1) as pool:
        swapping = pool.submit(swap_five_times)
        while not swapping.done():
            swapped = tiny_engine.complete_all(PROMPTS, max_tokens=120)
            assert [each.token_ids for each in swapped] == [each.token_ids for each in reference]
        swapping.result()
    assert tiny_engine.ok("/paceline/digest")["target"] == digest


def test_a_committed_draft_is_the_one_that_proposes(tiny_engine: LiveEngine) -> None:
    """Proposals after swap-out and swap-in equal those before; another draft's differ."""

    def proposals() -> list[list[int]]:
        completion = tiny_engine.complete(PROMPTS[0], max_tokens=24, cache_salt="proposals")
        tiny_engine.settle()
        spans = [span for _, span in tiny_engine.spans_of(completion) if span.num_proposed]
        return [span.token_ids[-span.num_proposed :] for span in spans]

    tiny_engine.ok("/paceline/status")
    original = proposals()
    tiny_engine.swap(1)
    other = proposals()
    tiny_engine.swap(0)
    assert proposals() == original
    assert other != original


def test_versions_are_stamped_where_weights_change(tiny_engine: LiveEngine) -> None:
    before = tiny_engine.complete(PROMPTS[1])
    tiny_engine.swap(2)
    after = tiny_engine.complete(PROMPTS[1])
    tiny_engine.settle()
    assert {span.draft_version for _, span in tiny_engine.spans_of(before)} == {0}
    assert {span.draft_version for _, span in tiny_engine.spans_of(after)} == {2}


def test_the_draft_digest_tells_drafts_apart_and_the_target_digest_stays(tiny_engine: LiveEngine) -> None:
    first = tiny_engine.ok("/paceline/digest")
    tiny_engine.swap(1)
    second = tiny_engine.ok("/paceline/digest")
    tiny_engine.swap(0)
    third = tiny_engine.ok("/paceline/digest")
    assert first == third
    assert second["draft"] != first["draft"]
    assert second["target"] == first["target"]


def test_a_failure_half_way_through_a_commit_restores_the_old_draft(tiny_engine: LiveEngine) -> None:
    digest = tiny_engine.ok("/paceline/digest")
    reference = tiny_engine.complete(PROMPTS[2], max_tokens=64)
    tiny_engine.stage(1)
    tiny_engine.rpc("probe_fail_next_load")
    status, answer = tiny_engine.call("/paceline/commit", {"version": 1, "expected_active": 0})
    assert status == 409
    assert "back in force" in answer["error"]["message"]
    assert tiny_engine.active() == 0
    assert tiny_engine.ok("/paceline/digest") == digest
    assert tiny_engine.complete(PROMPTS[2], max_tokens=64).token_ids == reference.token_ids
    assert tiny_engine.commit(1)["version"] == 1


def test_a_stale_expectation_is_refused(tiny_engine: LiveEngine) -> None:
    tiny_engine.stage(1)
    status, answer = tiny_engine.call("/paceline/commit", {"version": 1, "expected_active": 7})
    assert (status, answer["error"]["code"]) == (409, "stale_expected_active")


def test_a_version_that_was_not_staged_is_refused(tiny_engine: LiveEngine) -> None:
    status, answer = tiny_engine.call("/paceline/commit", {"version": 77, "expected_active": 0})
    assert status == 409
    assert "stage it first" in answer["error"]["message"]


def edit_tensor(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS_FILE)
        tensors[name] = change(tensors[name])
        save_file(tensors, directory / WEIGHTS_FILE)

    return edit


def add_tensor(name: str) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS_FILE)
        save_file(tensors | {name: np.zeros((4, 4), np.float32)}, directory / WEIGHTS_FILE)

    return edit


def edit_spec(directory: Path) -> None:
    manifest = json.loads((directory / MANIFEST_FILE).read_text())
    manifest["spec"]["target_revision"] = "another"
    (directory / MANIFEST_FILE).write_text(json.dumps(manifest))


def edit_config(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))


def empty_config(directory: Path) -> None:
    (directory / "config.json").write_text("[]")


def poison(array: np.ndarray) -> np.ndarray:
    return np.full_like(array, np.nan)


BAD_DRAFTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "nan": (edit_tensor("fc.weight", poison), "NaN"),
    "wrong shape": (edit_tensor("fc.weight", lambda array: array[:-1].copy()), "shape"),
    "wrong dtype": (edit_tensor("fc.weight", lambda array: array.astype(np.float16)), "needs torch.float32"),
    "map out of range": (edit_tensor("d2t", lambda array: array + 10_000), "d2t"),
    "map not unique": (edit_tensor("d2t", lambda array: array - np.arange(array.size)), "d2t"),
    "unknown tensor": (add_tensor("surplus.weight"), "unknown"),
    "carries embeddings": (add_tensor("embed_tokens.weight"), "embed_tokens"),
    "another geometry": (edit_config, "config.json differs"),
    "config is no object": (empty_config, "no JSON object"),
    "another target": (edit_spec, "target_revision"),
}


@pytest.mark.parametrize("kind", BAD_DRAFTS)
def test_a_bad_draft_is_refused_while_staging(tiny_engine: LiveEngine, kind: str) -> None:
    """Sealed with right checksums, so only the engine's own checks stand between it and the model."""
    spoil, reason = BAD_DRAFTS[kind]
    directory = new_version(tiny_engine.state_dir)
    spoil(directory)
    seal(directory)
    status, answer = tiny_engine.call("/paceline/stage", {"version": int(directory.name)})
    shutil.rmtree(directory)
    assert status == 422
    assert reason in answer["error"]["message"]
    assert tiny_engine.active() == 0


def test_an_altered_or_truncated_file_is_refused_by_checksum(tiny_engine: LiveEngine) -> None:
    directory = new_version(tiny_engine.state_dir)
    seal(directory)
    weights = directory / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-100])
    status, answer = tiny_engine.call("/paceline/stage", {"version": int(directory.name)})
    shutil.rmtree(directory)
    assert status == 422
    assert "checksum" in answer["error"]["message"]


@pytest.mark.parametrize("version", ["../1", "1/../2", -1, 1.5, None, True, 10**30])
def test_only_a_plain_version_number_names_a_draft(tiny_engine: LiveEngine, version: object) -> None:
    status, answer = tiny_engine.call("/paceline/stage", {"version": version})
    assert status in (400, 422)
    assert answer["error"]["message"]


def test_private_routes_need_the_token(tiny_engine: LiveEngine) -> None:
    for path, body in [("/paceline/status", None), ("/paceline/commit", {"version": 1, "expected_active": 0})]:
        assert tiny_engine.call(path, body, token=None)[0] == 401
        assert tiny_engine.call(path, body, token="wrong")[0] == 401


def new_version(state_dir: Path) -> Path:
    """A copy of draft 1 under the next number, not sealed yet."""
    drafts = state_dir / "drafts"
    version = max(int(path.name) for path in drafts.iterdir() if path.name.isdecimal()) + 1
    return Path(shutil.copytree(drafts / "1", drafts / str(version)))


def seal(directory: Path) -> None:
    """Make the manifest agree with the files."""
    path = directory / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    manifest["version"] = int(directory.name)
    manifest["sha256"] = {name: file_sha256(directory / name) for name in manifest["sha256"]}
    path.write_text(json.dumps(manifest))
