"""Making drafts: at random, from an EAGLE-3 checkpoint, with a larger vocabulary, and copies for use elsewhere. The command line calls these.

Shape letters: V target vocabulary, D hidden.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from drafter.artifact import load_draft, publish_draft, read_tensors
from drafter.draft import Draft, draft_from_tensors
from drafter.geometry import geometry_for_target, geometry_of_draft
from drafter.head import Head
from drafter.initialise import random_core
from drafter.model import DraftCore
from drafter.published import read_published_config
from drafter.target import TargetParts, load_target_parts
from drafter.vocabulary import choose_vocabulary, control_token_ids
from wire.artifact import CONFIG_FILE, WEIGHTS_FILE, DraftSource
from wire.errors import ArtifactError
from wire.spec import CaptureSpec, read_model_config, weights_revision
from wire.store import DraftStore

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def create_random_draft(store: DraftStore, spec: CaptureSpec, target_dir: Path, seed: int = 0) -> int:
    """Publish a random draft for the target and return its version; raises ConfigError where the target is unusable."""
    target = load_target_parts(target_dir)
    return publish_draft(store, random_draft(spec, target_dir, target, seed), spec, origin="random")


def random_draft(spec: CaptureSpec, target_dir: Path, target: TargetParts, seed: int) -> Draft:
    """A random draft in memory, its vocabulary chosen by the prior alone."""
    geometry = geometry_for_target(read_model_config(target_dir), spec)
    vocabulary = choose_vocabulary(torch.zeros(spec.vocab_size), control_token_ids(target_dir), spec.draft_vocab_size)
    return Draft(random_core(geometry, target, seed), Head.of_target(vocabulary, target.head_VD))


def import_draft(store: DraftStore, spec: CaptureSpec, target_dir: Path, checkpoint: Path) -> int:
    """Publish an existing EAGLE-3 checkpoint directory and return its version; raises ArtifactError where it does not fit.

    Its own lm_head and vocabulary map are kept. Both layouts of `drafter/published.py` are read.
    """
    draft, layout = checkpoint_draft(spec, target_dir, load_target_parts(target_dir), checkpoint)
    source = DraftSource(format=layout, path=str(checkpoint.absolute()), weights_revision=weights_revision(checkpoint))
    return publish_draft(store, draft, spec, origin="imported", source=source)


def grow_draft(store: DraftStore, version: int, spec: CaptureSpec, target_dir: Path) -> int:
    """Publish a version anew with a head of `spec.draft_vocab_size` tokens, more than it had, and return its new number.

    The core is the same. The tokens are those it had and low ids besides, until a learner chooses by traffic. Raises
    ArtifactError where its head is not made of the target's rows or would shrink, SpecMismatch where more than the size differs.
    """
    manifest = store.manifest(version)
    size = manifest.spec.draft_vocab_size
    if spec.draft_vocab_size < size:
        raise ArtifactError(
            f"draft {version} proposes {size} tokens, draft.vocab_size is {spec.draft_vocab_size}: a draft can grow, not shrink; "
            f"set draft.vocab_size to {size} or more, or begin in another directory (--set state.dir=DIR)"
        )
    spec.require(msgspec.structs.replace(manifest.spec, draft_vocab_size=spec.draft_vocab_size), who=f"draft {version}")
    target = load_target_parts(target_dir)
    draft = load_draft(store, version, manifest.spec, target)
    if not draft.head.is_target_rows:
        raise ArtifactError(
            f"draft {version} brings head rows of its own for {size} tokens and has none for others; set draft.vocab_size={size}"
        )
    known_V = torch.zeros(spec.vocab_size)
    known_V[draft.head.vocabulary.ids_U] = 1.0
    vocabulary = choose_vocabulary(known_V, control_token_ids(target_dir), spec.draft_vocab_size)
    core = DraftCore(replace(draft.core.geometry, draft_vocab_size=spec.draft_vocab_size))
    core.load_state_dict(draft.core.state_dict())
    return publish_draft(
        store,
        Draft(core, Head.of_target(vocabulary, target.head_VD)),
        spec,
        origin=manifest.origin,
        parent=version,
        source=manifest.source,
        training=manifest.training,
        gate=manifest.gate,
    )


def checkpoint_draft(spec: CaptureSpec, target_dir: Path, target: TargetParts, checkpoint: Path) -> tuple[Draft, str]:
    """A checkpoint directory's draft in memory, and the name of its layout; raises ArtifactError where it does not fit."""
    who = f"checkpoint {checkpoint.name}"
    _require_safetensors(checkpoint)
    found = read_published_config(checkpoint, read_model_config(target_dir), who=who)
    geometry = geometry_of_draft(found.config, spec, who=who)
    return draft_from_tensors(read_tensors(checkpoint, who=who), geometry, target, who=who), found.layout


def _require_safetensors(checkpoint: Path) -> None:
    if not checkpoint.is_dir():
        raise ArtifactError(
            f"{checkpoint} is not a directory; give the directory of an EAGLE-3 checkpoint "
            "(`hf download ORG/NAME --local-dir DIR` makes one)"
        )
    if next(checkpoint.glob("*.safetensors"), None) is not None:
        return
    pickled = sorted(path.name for pattern in _PICKLED for path in checkpoint.glob(pattern))
    if pickled:
        raise ArtifactError(
            f"{checkpoint} holds {pickled[0]}, a pickle, which can run code when it is read; only safetensors are. "
            "If you trust it, have the tool that made it, or its publisher, save it as safetensors"
        )
    raise ArtifactError(f"{checkpoint} holds no *.safetensors file; it is not an EAGLE-3 checkpoint")


def export_draft(store: DraftStore, version: int, out_dir: Path) -> None:
    """Copy a verified version's config.json and model.safetensors to a new directory that vLLM can load."""
    store.verify(version)
    if out_dir.exists() and any(out_dir.iterdir()):
        raise ArtifactError(f"{out_dir} is not empty; export to a new directory")
    out_dir.mkdir(parents=True, exist_ok=True)
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        shutil.copyfile(store.directory(version) / name, out_dir / name)
