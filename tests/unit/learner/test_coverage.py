"""What the active draft could propose of what arrives, domain by domain."""

from __future__ import annotations

import pytest
import torch

from drafter.artifact import publish_draft, read_vocabulary
from drafter.create import random_draft
from drafter.draft import Draft
from drafter.head import Head
from drafter.vocabulary import DraftVocabulary
from learner.coverage import CoverageMeter
from learner.replay import emitted_tokens
from wire.artifact import WEIGHTS_FILE
from wire.store import DraftStore

WHOLE, PART = 0, 1
"""Versions that can propose all that the tiny world says, and only the tokens from 16 on."""


@pytest.fixture
def store(tmp_path, spec, target_dir, target) -> DraftStore:
    made = DraftStore(tmp_path / "drafts-of-two-kinds")
    core = random_draft(spec, target_dir, target, seed=0).core
    for first in (0, 16):
        vocabulary = DraftVocabulary(torch.arange(first, first + 48), 64)
        publish_draft(made, Draft(core, Head.of_target(vocabulary, target.head_VD)), spec, origin="random")
    return made


def share(request, store: DraftStore, version: int) -> float:
    """The plain share of a request's emitted tokens that a version can propose."""
    ids = set(read_vocabulary(store, version).ids_U.tolist())
    tokens = emitted_tokens(request).tolist()
    return sum(token in ids for token in tokens) / len(tokens)


def test_each_domain_is_measured_against_the_draft_that_serves(store, make_request):
    meter = CoverageMeter(store, 4)
    code, chat = make_request("a", first=2), make_request("b", first=5, domain="chat")
    assert 0 < share(chat, store, PART) < share(chat, store, WHOLE) == 1
    meter.note(code, WHOLE)
    meter.note(chat, PART)
    found = {one.domain: one for one in meter.view}
    assert found["code"].share == 1.0
    assert found["chat"].share == pytest.approx(share(chat, store, PART))
    assert found["chat"].tenant == "t"
    assert found["chat"].num_tokens == chat.num_tokens


def test_it_follows_a_better_map(store, make_request):
    meter = CoverageMeter(store, 4)
    request = make_request("a", total=2000)
    for version in (PART, WHOLE):
        for _ in range(20):
            meter.note(request, version)
        assert meter.view[0].share == pytest.approx(share(request, store, version), abs=0.01)


def test_labels_of_clients_do_not_pile_up(store, make_request):
    meter = CoverageMeter(store, 2)
    for domain in ("a", "b", "a", "c"):
        meter.note(make_request(domain=domain), WHOLE)
    assert [one.domain for one in meter.view] == ["a", "c"]


def test_a_draft_that_cannot_be_read_measures_nothing(store, make_request):
    (store.directory(PART) / WEIGHTS_FILE).write_bytes(b"spoilt")
    meter = CoverageMeter(store, 2)
    meter.note(make_request(), PART)
    assert meter.view == ()
    meter.note(make_request(), WHOLE)
    assert meter.view[0].share == 1.0
