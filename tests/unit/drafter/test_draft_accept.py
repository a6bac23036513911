from __future__ import annotations

import pytest
import torch

from drafter.accept import Acceptance, log_totals, simulate, target_probability
from drafter.create import random_draft
from drafter.reference import unroll_anchor


def acceptance(rows: list[list[float]]) -> Acceptance:
    table = torch.tensor(rows)
    count = table.shape[1]
    return Acceptance(table, torch.ones(count, dtype=torch.bool), torch.arange(count))


def test_length_is_one_plus_sum_of_products():
    lengths_A = acceptance([[0.5, 0.0], [0.5, 1.0], [0.5, 1.0]]).length_A
    assert lengths_A.tolist() == pytest.approx([1 + 0.5 + 0.25 + 0.125, 1.0])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_simulation_equals_token_by_token_judgement(target_dir, spec, target, make_request, temperature):
    draft = random_draft(spec, target_dir, target, seed=0)
    request = make_request(4, 12, temperature=temperature)
    result = simulate(draft.core, draft.head, target.embedding_VD, target.head_VD, request, 3)
    assert result is not None
    for anchor in result.valid_A.nonzero().squeeze(1).tolist():
        row = int(result.positions_A[anchor])
        outputs = unroll_anchor(draft.core, target.embedding_VD, request, row, request.next_tokens_T[row : row + 3].tolist())
        for depth, output in enumerate(outputs):
            proposed = int(draft.head.vocabulary.ids_U[(draft.head.weight_UD @ output).argmax()])
            if temperature == 0:
                expected = float(proposed == int(request.next_tokens_T[row + 1 + depth]))
            else:
                logits = target.head_VD @ request.hidden_TD[row + 1 + depth] / temperature
                expected = float(logits.softmax(0)[proposed])
            assert float(result.probability_KA[depth, anchor]) == pytest.approx(expected, abs=1e-5)


def test_a_request_without_anchor_has_no_acceptance(target_dir, spec, target, make_request):
    draft = random_draft(spec, target_dir, target, seed=0)
    assert simulate(draft.core, draft.head, target.embedding_VD, target.head_VD, make_request(5, 5), 3) is None


def test_target_probability_is_that_of_the_full_vocabulary(target):
    hidden = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    totals = log_totals(hidden, target.head_VD, 1.0)
    probability = target_probability(hidden, torch.tensor([0, 63, 5]), totals, target.head_VD, 1.0)
    full = (hidden @ target.head_VD.T).softmax(-1)
    torch.testing.assert_close(probability, torch.stack([full[0, 0], full[1, 63], full[2, 5]]))
