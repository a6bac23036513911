from __future__ import annotations

from math import log

import pytest
import torch
from rl_samples import make_group

from rl.algorithms.kl import k1, k3
from rl.algorithms.overlong import overlong_penalty
from rl.algorithms.sampling import has_signal, with_signal
from wire.errors import RolloutError


def test_both_estimators_have_the_divergence_as_their_mean() -> None:
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    divergence = float((q * (q / p).log()).sum())
    assert float((q * k1((p / q).log())).sum()) == pytest.approx(divergence)
    assert float((q * k3((p / q).log())).sum()) == pytest.approx(divergence)


def test_k3_of_close_policies_does_not_cancel() -> None:
    assert float(k3(torch.tensor(1e-4, dtype=torch.float32))) == pytest.approx(5e-9, rel=0.01)
    assert float(k3(torch.tensor(1e-6, dtype=torch.float64))) == pytest.approx(5e-13, rel=1e-3)
    assert float(k3(torch.tensor(log(2.0), dtype=torch.float64))) == pytest.approx(1.0 - log(2.0))


def test_punishment_begins_at_the_buffer_and_ends_at_the_limit() -> None:
    found = [overlong_penalty(length, max_tokens=100, buffer_tokens=20) for length in (0, 80, 85, 90, 100, 130)]
    assert found == pytest.approx([0.0, 0.0, -0.25, -0.5, -1.0, -1.0])
    assert overlong_penalty(100, max_tokens=100, buffer_tokens=0) == 0.0
    with pytest.raises(RolloutError, match="buffer of 101 tokens"):
        overlong_penalty(1, max_tokens=100, buffer_tokens=101)


def test_groups_of_equal_rewards_are_told_from_the_others() -> None:
    groups = [make_group(0, rewards=(1.0, 1.0)), make_group(1, rewards=(0.0, 1.0)), make_group(2, rewards=(0.0, 0.0))]
    kept, dropped = with_signal(groups)
    assert [group.group_id for group in kept] == [1]
    assert [group.group_id for group in dropped] == [0, 2]
    assert not has_signal(make_group(3, rewards=(0.3,)))
