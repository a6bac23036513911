from __future__ import annotations

import pytest
import torch

from rl.algorithms import advantages_reference as reference
from rl.algorithms.advantages import advantages
from rl.algorithms.config import Advantage
from wire.errors import RolloutError

GROUPS = [0, 0, 0, 7, 7, 2, 7, 2, 2, 2]
LENGTHS = [4, 9, 1, 3, 3, 8, 2, 5, 5, 6]


def random_rewards(seed: int) -> list[float]:
    return torch.rand(len(GROUPS), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()


def compute(kind: Advantage, rewards: list[float], groups: list[int], lengths: list[int]) -> list[float]:
    return advantages(kind, torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), torch.tensor(lengths)).tolist()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        ("mean", reference.minus_group_mean),
        ("group_std", reference.over_group_std),
        ("batch_std", reference.over_batch_std),
        ("token_batch_std", lambda rewards, groups: reference.over_token_batch_std(rewards, groups, LENGTHS)),
    ],
)
def test_advantages_are_those_written_down_plainly(kind, plain, seed: int) -> None:
    rewards = random_rewards(seed)
    assert compute(kind, rewards, GROUPS, LENGTHS) == pytest.approx(plain(rewards, GROUPS), abs=1e-6)


def test_advantages_of_two_groups_by_hand() -> None:
    rewards, groups, lengths = [1.0, 0.0, 0.0, 3.0, 1.0], [0, 0, 0, 1, 1], [1, 1, 2, 2, 2]
    assert compute("mean", rewards, groups, lengths) == pytest.approx([2 / 3, -1 / 3, -1 / 3, 1.0, -1.0])
    # Sample variances: (4 + 1 + 1) / 9 / 2 = 1/3 and (1 + 1) / 1 = 2.
    third, half = 3**0.5, 0.5**0.5
    assert compute("group_std", rewards, groups, lengths) == pytest.approx(
        [2 / 3 * third, -third / 3, -third / 3, half, -half], abs=1e-5
    )
    # Mean square over five sequences: (4 + 1 + 1) / 9 + 2 = 8/3, over 5.
    scale = (8 / 15) ** -0.5
    assert compute("batch_std", rewards, groups, lengths)[3] == pytest.approx(scale, abs=1e-5)


@pytest.mark.parametrize("kind", ["mean", "group_std", "batch_std", "token_batch_std"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 12345.678])
def test_equal_rewards_have_no_advantage(kind: Advantage, reward: float) -> None:
    assert compute(kind, [reward] * 7, [0] * 7, [3] * 7) == pytest.approx([0.0] * 7, abs=1e-5)


def test_a_rollout_alone_in_its_group_has_no_advantage() -> None:
    assert compute("group_std", [5.0, 1.0, 2.0], [0, 1, 1], [1, 1, 1])[0] == 0.0


def test_token_normalised_advantages_have_mean_zero_and_variance_one_over_tokens() -> None:
    found = torch.tensor(compute("token_batch_std", random_rewards(9), GROUPS, LENGTHS))
    tokens = found.repeat_interleave(torch.tensor(LENGTHS))
    assert float(tokens.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(tokens.var(unbiased=False)) == pytest.approx(1.0, abs=1e-4)


def test_bad_rewards_are_refused() -> None:
    with pytest.raises(RolloutError, match="not all finite"):
        compute("mean", [1.0, float("nan")], [0, 0], [1, 1])
    with pytest.raises(RolloutError, match="equally long"):
        compute("mean", [1.0, 2.0], [0], [1, 1])
