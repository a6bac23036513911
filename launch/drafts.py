"""`paceline draft`: make, import, list, show, activate, roll back and export drafts. Making and exporting import torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from launch import models
from launch.config import SystemConfig
from launch.probe import AdminClient
from launch.rundir import LaunchError, RunDir
from wire.artifact import CONFIG_FILE
from wire.errors import ArtifactError
from wire.spec import CaptureSpec, resolve_capture_spec
from wire.store import DraftStore


def init(config: SystemConfig) -> int:
    """Make a draft as `[draft]` says and return its version. The first one also becomes active and the floor."""
    if config.draft.checkpoint is not None:
        return import_checkpoint(config, config.draft.checkpoint)
    from drafter.create import create_random_draft

    target_dir, spec = target_and_spec(config)
    store = DraftStore(config.state.directory)
    return _first_serves(store, create_random_draft(store, spec, target_dir, config.draft.seed))


def import_checkpoint(config: SystemConfig, checkpoint: Path) -> int:
    """Make a draft of a published EAGLE-3 checkpoint and return its version; the first draft also becomes active and the floor.

    Raises ArtifactError where the checkpoint does not fit the target.
    """
    from drafter.create import import_draft

    target_dir, spec = target_and_spec(config)
    store = DraftStore(config.state.directory)
    return _first_serves(store, import_draft(store, spec, target_dir, checkpoint))


def target_and_spec(config: SystemConfig) -> tuple[Path, CaptureSpec]:
    target_dir = models.resolve(config.target.path, lambda _what, _share: None)
    spec = resolve_capture_spec(
        target_dir,
        dtype=config.target.dtype,
        draft_vocab_size=config.draft.vocab_size,
        aux_layer_ids=config.draft.aux_layer_ids,
    )
    return target_dir, spec


def _first_serves(store: DraftStore, version: int) -> int:
    if store.active() is None:
        store.set_active(version)
    if store.floor() is None:
        store.set_floor(version)
    return version


def first_equal(store: DraftStore, version: int) -> int | None:
    """The oldest other draft whose files have the same checksums; raises ArtifactError for a version that cannot be read."""
    wanted = store.manifest(version).sha256
    return next((other for other in store.versions() if other != version and _checksums(store, other) == wanted), None)


def _checksums(store: DraftStore, version: int) -> dict[str, str]:
    """Empty where the manifest is unreadable."""
    try:
        return store.manifest(version).sha256
    except ArtifactError:
        return {}


def how_to_serve(store: DraftStore, version: int) -> str:
    """What it takes to have a draft serve, in words; an engine cannot change its draft's shape while it runs."""
    active = store.active()
    if active == version:
        return "active"
    if active is None or _shape(store, active) == _shape(store, version):
        return f"`paceline draft activate {version} --force` swaps it in; no gate has judged it"
    return (
        f"draft {active}, which is active, has another shape, so no running engine can swap it in; "
        "to start from it, import it into an empty directory (--set state.dir=DIR)"
    )


def _shape(store: DraftStore, version: int) -> tuple[CaptureSpec, bytes]:
    return store.manifest(version).spec, (store.directory(version) / CONFIG_FILE).read_bytes()


def repair_active(store: DraftStore, report: Callable[[str], None]) -> None:
    """Point `active` at the floor, else at the newest sound draft, where it leads to none; raises ArtifactError or OSError.

    Without any sound draft the pointer stays: it tells what was there.
    """
    active = store.active()
    if is_sound(store, active) or store.active() != active:  # a swap may move the pointer meanwhile: it is live then
        return
    for version in (store.floor(), *reversed(store.versions())):
        if version is not None and is_sound(store, version):
            store.set_active(version)
            report(f"the active draft ({'none' if active is None else active}) cannot be loaded: draft {version} is active now")
            return
    report(f"no draft in {store.root} is sound; `paceline draft show N` says what is wrong with one")


def is_sound(store: DraftStore, version: int | None) -> bool:
    """Whether the version exists and every checksum holds."""
    if version is None:
        return False
    try:
        store.verify(version)
    except ArtifactError:
        return False
    return True


def listing(store: DraftStore) -> list[str]:
    """A heading and one line per draft, newest last; empty where there is none."""
    lines = []
    active, floor = store.active(), store.floor()
    for version in store.versions():
        try:
            manifest = store.manifest(version)
        except ArtifactError as error:
            lines.append(f"{version:>5}  unreadable: {error}")
            continue
        marks = [name for name, pointer in (("active", active), ("floor", floor)) if pointer == version]
        if manifest.source is not None:
            marks.append(f"from {manifest.source.path} ({manifest.source.format})")
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created_at_s))
        parent = "-" if manifest.parent is None else str(manifest.parent)
        gate = f"{manifest.gate.candidate_al:.2f}" if manifest.gate else "-"
        lines.append(f"{version:>5}  {made}  {manifest.origin:<9} {parent:>6}  {gate:>12}  {' '.join(marks)}".rstrip())
    heading = f"{'draft':>5}  {'made':<19}  {'origin':<9} {'parent':>6}  {'simulated AL':>12}"
    return [heading, *lines] if lines else []


def show(store: DraftStore, version: int) -> str:
    """The manifest as JSON, after every checksum was verified; raises ArtifactError."""
    return msgspec.json.format(msgspec.json.encode(store.verify(version)), indent=2).decode()


def export(store: DraftStore, version: int, out_dir: Path) -> None:
    """Write a stand-alone EAGLE-3 checkpoint that stock vLLM loads."""
    from drafter.create import export_draft

    export_draft(store, version, out_dir)


def admin_client(state_dir: Path) -> AdminClient:
    """The admin API of the system that runs from `state_dir`; raises LaunchError."""
    run_dir = RunDir(state_dir)
    return AdminClient(str(run_dir.read_system()["admin_url"]), run_dir.operator_token())


def activate(state_dir: Path, version: int, *, expected_active: int | None, force: bool) -> str:
    """Ask the gateway to swap; returns what it says. Raises LaunchError."""
    if expected_active is None:
        expected_active = DraftStore(state_dir).active()
        if expected_active is None:
            raise LaunchError("no draft is active; start the system with `paceline up`")
    answer = admin_client(state_dir).post(
        f"/admin/drafts/{version}/activate", {"expected_active": expected_active, "force": force}
    )
    return msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()


def rollback(state_dir: Path) -> str:
    """Ask the gateway for the previous draft; returns what it says. Raises LaunchError."""
    answer = admin_client(state_dir).post("/admin/drafts/rollback")
    return msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()
