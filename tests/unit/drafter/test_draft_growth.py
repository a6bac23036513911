"""A draft with more tokens to propose keeps its core, its evidence and the tokens it had."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from drafter.artifact import load_draft, publish_draft, read_vocabulary
from drafter.create import create_random_draft, grow_draft, random_draft
from drafter.draft import Draft
from drafter.head import Head
from drafter.vocabulary import DraftVocabulary
from wire.artifact import GateReport
from wire.errors import ArtifactError, SpecMismatch
from wire.store import DraftStore

GATE = GateReport(accepted=True, reason="", candidate_al=1.9, incumbent_al=1.4, gain_low=0.3, gain_high=0.7, num_requests=16)


@pytest.fixture
def store(tmp_path) -> DraftStore:
    return DraftStore(tmp_path / "state")


def test_a_grown_draft_is_the_old_one_with_more_tokens(store, target_dir, spec, target):
    made = random_draft(spec, target_dir, target, seed=3)
    ids_U = torch.arange(20, 52)
    old = publish_draft(
        store, Draft(made.core, Head.of_target(DraftVocabulary(ids_U, 64), target.head_VD)), spec, origin="learned", gate=GATE
    )
    larger = msgspec.structs.replace(spec, draft_vocab_size=40)
    grown = load_draft(store, version := grow_draft(store, old, larger, target_dir), larger, target)
    assert all(torch.equal(value, made.core.state_dict()[name]) for name, value in grown.core.state_dict().items())
    assert set(ids_U.tolist()) <= set(grown.head.vocabulary.ids_U.tolist())
    assert grown.head.is_target_rows
    assert grown.head.weight_UD.shape[0] == grown.core.geometry.draft_vocab_size == 40
    assert (store.manifest(version).parent, store.manifest(version).gate, store.manifest(version).origin) == (
        old,
        GATE,
        "learned",
    )
    assert load_draft(store, old, spec, target).head.vocabulary.ids_U.tolist() == ids_U.tolist()


def test_what_cannot_grow_is_refused(store, target_dir, spec, target):
    version = create_random_draft(store, spec, target_dir, seed=0)
    with pytest.raises(ArtifactError, match=r"a draft can grow, not shrink; set draft\.vocab_size to 32 or more"):
        grow_draft(store, version, msgspec.structs.replace(spec, draft_vocab_size=31), target_dir)
    with pytest.raises(SpecMismatch, match="aux_layer_ids"):
        grow_draft(store, version, msgspec.structs.replace(spec, draft_vocab_size=40, aux_layer_ids=(1, 2, 3)), target_dir)
    made = random_draft(spec, target_dir, target, seed=0)
    own = Draft(made.core, replace(made.head, weight_UD=made.head.weight_UD * 2))
    imported = publish_draft(store, own, spec, origin="imported")
    with pytest.raises(ArtifactError, match="head rows of its own for 32 tokens"):
        grow_draft(store, imported, msgspec.structs.replace(spec, draft_vocab_size=40), target_dir)


def test_the_map_alone_is_read_and_checked(store, target_dir, spec, target):
    version = create_random_draft(store, spec, target_dir, seed=0)
    assert read_vocabulary(store, version).sha256 == store.manifest(version).d2t_sha256
    other = publish_draft(store, random_draft(msgspec.structs.replace(spec), target_dir, target, seed=1), spec, origin="random")
    weights = store.directory(version) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ArtifactError, match="cannot read its vocabulary map"):
        read_vocabulary(store, version)
    assert read_vocabulary(store, other).vocab_size == 64
