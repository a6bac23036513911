"""The drafter is the engine's draft, and captured rows are the target's hidden states: fp32, tiny and real model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from live_engine import Completion, LiveEngine
from transformers import AutoModelForCausalLM

from drafter.artifact import load_draft
from drafter.batch import UNKNOWN_TOKEN, RequestRows
from drafter.draft import Draft
from drafter.reference import unroll_anchor
from drafter.target import load_target_parts
from wire.messages import CaptureSpan
from wire.store import DraftStore

PROMPT = "def add(a, b):\n    "
MIN_AGREEMENT = 0.995


def captured_rows(engine: LiveEngine, completion: Completion) -> tuple[RequestRows, list[CaptureSpan]]:
    """The valid rows of a completion that was captured from its first token, and its verify steps."""
    num_aux = 3
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    spans: list[CaptureSpan] = []
    for item in engine.listener.captured:
        offset = 0
        for span in item.message.spans:
            if completion.request_id in span.request_id:
                width = item.message.spec.hidden_size
                aux = torch.frombuffer(bytearray(item.aux), dtype=torch.float32).view(-1, num_aux * width)
                hidden = torch.frombuffer(bytearray(item.hidden), dtype=torch.float32).view(-1, width)
                for row in range(span.num_valid_rows):
                    rows[span.first_position + row] = (aux[offset + row], hidden[offset + row])
                if span.num_proposed:
                    spans.append(span)
            offset += span.num_rows
    positions = sorted(rows)
    assert positions == list(range(len(positions)))
    ids = [*completion.ids, *[UNKNOWN_TOKEN] * len(positions)]
    request = RequestRows(
        positions_T=torch.tensor(positions),
        next_tokens_T=torch.tensor([ids[position + 1] for position in positions]),
        aux_TX=torch.stack([rows[position][0] for position in positions]),
        hidden_TD=torch.stack([rows[position][1] for position in positions]),
        num_prompt_tokens=len(completion.prompt_ids),
        temperature=0.0,
    )
    return request, spans


@pytest.fixture(params=["tiny_engine", "real_engine"])
def engine(request: pytest.FixtureRequest) -> LiveEngine:
    live: LiveEngine = request.getfixturevalue(request.param)
    if live.active() != 0:
        live.swap(0)
    return live


def draft_logits(draft: Draft, embedding_VD: torch.Tensor, request: RequestRows, span: CaptureSpan) -> torch.Tensor:
    """Our logits [K, U] for the proposals of one verify step: inputs are the last token, then the proposals themselves."""
    inputs = span.token_ids[: span.num_proposed]
    outputs = unroll_anchor(draft.core, embedding_VD, request, span.first_position - 1, inputs)
    return torch.stack(outputs) @ draft.head.weight_UD.float().T


@torch.inference_mode()
def test_our_draft_proposes_what_the_engine_proposed(engine: LiveEngine) -> None:
    completion = engine.complete(PROMPT, max_tokens=48, cache_salt="parity")
    engine.settle()
    request, spans = captured_rows(engine, completion)
    target = load_target_parts(engine.target_dir)
    store = DraftStore(engine.state_dir)
    draft = load_draft(store, 0, store.manifest(0).spec, target)
    ours: list[int] = []
    theirs: list[int] = []
    for span in spans[:-1]:
        logits_KU = draft_logits(draft, target.embedding_VD.float(), request, span)
        ours += draft.head.vocabulary.ids_U[logits_KU.argmax(dim=-1)].tolist()
        theirs += span.token_ids[-span.num_proposed :]
    assert len(theirs) >= 60
    agreement = sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(theirs)
    assert agreement >= MIN_AGREEMENT, (agreement, list(zip(ours, theirs, strict=True)))


@torch.inference_mode()
def test_our_draft_logits_are_close_to_the_engines(tiny_engine: LiveEngine) -> None:
    if tiny_engine.active() != 0:
        tiny_engine.swap(0)
    tiny_engine.rpc("probe_take_draft_logits")
    completion = tiny_engine.complete(PROMPT, max_tokens=32, cache_salt="logits")
    tiny_engine.settle()
    theirs_all = torch.tensor(tiny_engine.rpc("probe_take_draft_logits"))
    request, spans = captured_rows(tiny_engine, completion)
    target = load_target_parts(tiny_engine.target_dir)
    store = DraftStore(tiny_engine.state_dir)
    draft = load_draft(store, 0, store.manifest(0).spec, target)
    compared = 0
    for index, span in enumerate(spans[:-1]):
        theirs_KU = theirs_all[3 * index : 3 * index + 3][:, draft.head.vocabulary.ids_U]
        ours_KU = draft_logits(draft, target.embedding_VD.float(), request, span)
        torch.testing.assert_close(ours_KU, theirs_KU[: span.num_proposed], atol=2e-4, rtol=2e-4)
        compared += span.num_proposed
    assert compared >= 30


@torch.inference_mode()
def test_captured_rows_are_the_targets_hidden_states(engine: LiveEngine) -> None:
    """Aux id k is Hugging Face's hidden_states[k]; the final row is after the last norm."""
    completion = engine.complete(PROMPT, max_tokens=48, cache_salt="hidden")
    engine.settle()
    request, _ = captured_rows(engine, completion)
    num_rows = min(request.positions_T.numel(), len(completion.ids))
    model = AutoModelForCausalLM.from_pretrained(engine.target_dir, dtype=torch.float32)
    output = model(torch.tensor([completion.ids[:num_rows]]), output_hidden_states=True)
    layer_ids = engine.listener.captured[-1].message.spec.aux_layer_ids
    expected_TX = torch.cat([output.hidden_states[layer][0] for layer in layer_ids], dim=-1)
    assert relative_error(request.aux_TX[:num_rows], expected_TX) < 1e-4
    assert relative_error(request.hidden_TD[:num_rows], output.hidden_states[-1][0]) < 1e-4


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest relative L2 error of a row."""
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@torch.inference_mode()
def test_the_real_model_serves_what_a_plain_forward_predicts(real_engine: LiveEngine, real_target: Path) -> None:
    completion = real_engine.complete(PROMPT, max_tokens=48)
    model = AutoModelForCausalLM.from_pretrained(real_target, dtype=torch.float32)
    ids = torch.tensor([completion.prompt_ids])
    expected = model.generate(ids, max_new_tokens=48, min_new_tokens=48, do_sample=False)[0, ids.shape[1] :].tolist()
    assert completion.token_ids == expected
