"""Every algorithm against its plain statement, values and gradients, and against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import exp, log

import pytest
import torch
from torch import Tensor

from rl.algorithms import losses_reference as reference
from rl.algorithms import shares_reference
from rl.algorithms.config import AlgorithmSettings, CorrectionSettings, Share
from rl.algorithms.counts import TokenCounts
from rl.algorithms.losses import PolicyTokens, policy_loss
from rl.algorithms.losses_reference import Rollout
from rl.algorithms.shares import shares
from wire.errors import ConfigError, RolloutError

MAX_TOKENS = 12
UNCORRECTED = CorrectionSettings(token_weight="none", sequence_band=None)


def make_tokens(
    seed: int, settings: AlgorithmSettings, *, spread: float = 0.3, dtype: torch.dtype = torch.float64
) -> PolicyTokens:
    """Five sequences of different lengths, one with the environment's words in between, padding full of nonsense."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(5, 9, dtype=torch.bool)
    for row, length in enumerate((9, 4, 1, 7, 6)):
        mask[row, :length] = True
    mask[3, 2:4] = False
    behaviour = -torch.rand(5, 9, generator=generator, dtype=dtype) * 3 - spread
    proximal = behaviour + torch.randn(5, 9, generator=generator, dtype=dtype) * spread
    current = proximal + torch.randn(5, 9, generator=generator, dtype=dtype) * spread
    garbage = torch.where(mask, 0.0, torch.tensor(float("-inf"), dtype=dtype))
    return PolicyTokens(
        current_BT=(current + garbage).requires_grad_(),
        behaviour_BT=behaviour + garbage,
        mask_BT=mask,
        share_BT=shares(settings.recipe.share, mask, torch.arange(5), MAX_TOKENS),
        advantage_B=torch.randn(5, generator=generator, dtype=dtype),
        proximal_BT=proximal + garbage,
        reference_BT=current.detach() + torch.randn(5, 9, generator=generator, dtype=dtype) * 0.2,
    )


def rollouts(tokens: PolicyTokens) -> list[Rollout]:
    assert tokens.proximal_BT is not None
    assert tokens.reference_BT is not None
    found = []
    for row, mask_T in enumerate(tokens.mask_BT):
        kept = mask_T.nonzero()[:, 0].tolist()
        columns = (tokens.proximal_BT, tokens.behaviour_BT, tokens.reference_BT)
        proximal, behaviour, away = ([float(column[row, t]) for t in kept] for column in columns)
        current = [tokens.current_BT[row, t] for t in kept]
        found.append(Rollout(current, proximal, behaviour, away, float(tokens.advantage_B[row])))
    return found


def assert_equals_reference(tokens: PolicyTokens, settings: AlgorithmSettings, expected: Tensor) -> None:
    loss = policy_loss(tokens, settings).total
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-9)
    (gradient,) = torch.autograd.grad(loss, tokens.current_BT)
    (expected_gradient,) = torch.autograd.grad(expected, tokens.current_BT)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-9)
    assert float(gradient.abs().sum()) > 0


ALGORITHMS: dict[str, Callable[..., Tensor]] = {
    "dapo": reference.dapo,
    "grpo": reference.grpo,
    "dr_grpo": partial(reference.dr_grpo, max_tokens=MAX_TOKENS),
    "cispo": reference.cispo,
    "gspo": reference.gspo,
    "reinforce++": reference.reinforce_pp,
}
CLIPS = {"dapo": (0.2, 0.28), "cispo": (1.0, 4.0), "gspo": (3e-4, 4e-4)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_is_its_plain_statement(name: str, seed: int) -> None:
    settings = AlgorithmSettings(name=name, correction=UNCORRECTED)
    # GSPO's limits are narrow: with tokens as far apart as the others' no sequence would have a gradient.
    tokens = make_tokens(seed, settings, spread=3e-4 if name == "gspo" else 0.3)
    low, high = CLIPS.get(name, (0.2, 0.2))
    assert_equals_reference(tokens, settings, ALGORITHMS[name](rollouts(tokens), reference.plain, low, high))


CORRECTIONS: dict[str, tuple[CorrectionSettings, reference.Weight]] = {
    "truncated": (CorrectionSettings(importance_cap=1.2, sequence_band=None), reference.truncated(1.2)),
    "banded": (
        CorrectionSettings(token_weight="band", token_band=(0.8, 1.25), sequence_band=None),
        reference.banded(0.8, 1.25),
    ),
    "sequence band": (
        CorrectionSettings(sequence_band=(0.9, 1.1)),
        reference.in_band(reference.truncated(2.0), 0.9, 1.1),
    ),
    "off-policy": (
        CorrectionSettings(token_weight="none", sequence_band=None, off_policy_delta=0.02),
        reference.near_policy(reference.plain, 0.02),
    ),
    "all": (
        CorrectionSettings(sequence_band=(0.8, 1.25), off_policy_delta=0.05),
        reference.near_policy(reference.in_band(reference.truncated(2.0), 0.8, 1.25), 0.05),
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_correction_is_its_plain_statement(name: str, correction: str, seed: int) -> None:
    corrected, weight = CORRECTIONS[correction]
    settings = AlgorithmSettings(name=name, correction=corrected, clip_low=0.3, clip_high=0.4)
    tokens = make_tokens(seed, settings)
    assert_equals_reference(tokens, settings, ALGORITHMS[name](rollouts(tokens), weight, 0.3, 0.4))


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_each_correction_leaves_something_out_and_something_in(correction: str) -> None:
    corrected, weight = CORRECTIONS[correction]
    tokens = [(rollout, t) for rollout in rollouts(make_tokens(0, AlgorithmSettings())) for t in range(len(rollout))]
    weights = [weight(rollout, t) for rollout, t in tokens]
    if corrected.token_weight == "none":
        unheld = [1.0 for _ in tokens]
    else:
        unheld = [reference.rhos(rollout)[t] for rollout, t in tokens]
    num_held = sum(one != other for one, other in zip(weights, unheld, strict=True))
    assert 0 < num_held < len(tokens)


def test_the_kl_to_the_reference_is_the_plain_one() -> None:
    settings = AlgorithmSettings(name="grpo", kl_weight=0.7, correction=CorrectionSettings(sequence_band=None))
    tokens = make_tokens(3, settings)
    expected = reference.grpo(rollouts(tokens), reference.truncated(2.0), 0.2, 0.2, kl_weight=0.7)
    assert_equals_reference(tokens, settings, expected)


def test_without_a_proximal_policy_the_current_one_is_it() -> None:
    settings = AlgorithmSettings()
    given = make_tokens(1, settings, spread=0.002)
    alone = PolicyTokens(given.current_BT, given.behaviour_BT, given.mask_BT, given.share_BT, given.advantage_B)
    same = PolicyTokens(
        given.current_BT, given.behaviour_BT, given.mask_BT, given.share_BT, given.advantage_B, given.current_BT.detach()
    )
    losses = [policy_loss(tokens, settings).total for tokens in (alone, same)]
    gradients = [torch.autograd.grad(loss, given.current_BT)[0] for loss in losses]
    assert torch.equal(*losses)
    assert torch.equal(*gradients)
    # Policy gradient: each token's weight, share and advantage, and nothing else.
    weight_BT = (given.current_BT.detach() - given.behaviour_BT).exp().clamp(max=2.0)
    expected_BT = -given.share_BT * weight_BT * given.advantage_B[:, None]
    torch.testing.assert_close(gradients[0], torch.where(given.mask_BT, expected_BT, 0.0))


def test_losses_of_the_parts_of_a_batch_add_up_to_its_loss() -> None:
    for name in ALGORITHMS:
        settings = AlgorithmSettings(name=name, correction=CorrectionSettings(sequence_band=(0.7, 1.4)))
        whole = make_tokens(2, settings)
        parts = [
            PolicyTokens(*(getattr(whole, field)[rows] for field in PolicyTokens.__dataclass_fields__))
            for rows in (slice(0, 2), slice(2, 3), slice(3, 5))
        ]
        results = [policy_loss(part, settings) for part in parts]
        expected = policy_loss(whole, settings)
        torch.testing.assert_close(sum((result.total for result in results), start=torch.zeros(())), expected.total)
        assert sum((result.counts for result in results), start=TokenCounts()) == expected.counts


def two_tokens(
    settings: AlgorithmSettings, ratios: list[list[float]], advantages: list[float], rho: float = 1.0
) -> PolicyTokens:
    """Two sequences, of two tokens and of one; every old probability is 1/2, mu's is that over rho."""
    proximal = torch.full((2, 2), log(0.5), dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    return PolicyTokens(
        current_BT=(proximal + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(),
        behaviour_BT=proximal - log(rho),
        mask_BT=mask,
        share_BT=shares(settings.recipe.share, mask, torch.arange(2), 4),
        advantage_B=torch.tensor(advantages, dtype=torch.float64),
        proximal_BT=proximal,
    )


@pytest.mark.parametrize(
    ("name", "golden"),
    [
        # Ratios 1.5 and 0.5 at A = 2 (held to 1.28 from above, not from below), 0.5 at A = -1 (held to 0.8).
        ("dapo", -(2 * 1.28 + 2 * 0.5 - 0.8) / 3),
        ("grpo", -((2 * 1.2 + 2 * 0.5) / 2 - 0.8) / 2),
        ("dr_grpo", -(2 * 1.2 + 2 * 0.5 - 0.8) / 4 / 2),
        ("reinforce++", -(2 * 1.2 + 2 * 0.5 - 0.8) / 3),
        # log pi = log 1/2 + log r; 1.5 is below CISPO's 5.
        ("cispo", -(1.5 * 2 * log(0.75) + 0.5 * 2 * log(0.25) + 0.5 * -1 * log(0.25)) / 3),
        # sqrt(1.5 * 0.5) = 0.866 is below 1.0004 at A = 2; 0.5 is held to 0.9997 at A = -1.
        ("gspo", -(2 * 0.75**0.5 - 0.9997) / 2),
    ],
)
def test_golden_losses(name: str, golden: float) -> None:
    settings = AlgorithmSettings(name=name, correction=UNCORRECTED)
    tokens = two_tokens(settings, [[1.5, 0.5], [0.5, 1.0]], [2.0, -1.0])
    assert policy_loss(tokens, settings).total.item() == pytest.approx(golden, rel=1e-6)


def test_golden_losses_with_importance_weights() -> None:
    def loss(rho: float, **changes: object) -> float:
        settings = AlgorithmSettings(correction=CorrectionSettings(sequence_band=None, **changes))
        return policy_loss(two_tokens(settings, [[1.5, 0.5], [0.5, 1.0]], [2.0, -1.0], rho), settings).total.item()

    plain = -(2 * 1.28 + 2 * 0.5 - 0.8) / 3
    assert loss(1.7) == pytest.approx(1.7 * plain)
    assert loss(3.0) == pytest.approx(2.0 * plain)
    assert loss(3.0, token_weight="band") == pytest.approx(3.0 * plain)
    assert loss(5.5, token_weight="band") == 0.0
    assert loss(0.4, token_weight="band") == 0.0
    # rho is 1, so mu/pi_theta is 1/r: the mean log of the bad sequence's is log 2, over 0.6 and below 0.7.
    assert loss(1.0, off_policy_delta=0.7) == pytest.approx(plain)
    assert loss(1.0, off_policy_delta=0.6) == pytest.approx(-(2 * 1.28 + 2 * 0.5) / 3)


def test_golden_gradient_is_zero_where_the_clip_holds() -> None:
    settings = AlgorithmSettings(correction=UNCORRECTED)
    tokens = two_tokens(settings, [[1.5, 0.5], [0.5, 1.0]], [2.0, -1.0])
    policy_loss(tokens, settings).total.backward()
    expected = torch.tensor([[0.0, -2 * 0.5 / 3], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(tokens.current_BT.grad, expected)


def test_counts_say_what_was_held_cut_and_left_out() -> None:
    settings = AlgorithmSettings(correction=CorrectionSettings(sequence_band=(0.5, 3.5)))
    counts = policy_loss(two_tokens(settings, [[1.5, 0.5], [0.5, 1.0]], [2.0, -1.0], rho=3.0), settings).counts
    assert counts == TokenCounts(num_tokens=3, num_masked=0, num_truncated=3, num_clipped_high=1, num_clipped_low=1)
    assert counts.clipped_fraction == pytest.approx(2 / 3)
    outside = AlgorithmSettings()
    assert policy_loss(two_tokens(outside, [[1.0, 1.0]] * 2, [2.0, -1.0], rho=1.02), outside).counts.masked_fraction == 1.0


def test_counts_of_cispo_are_of_either_sign_because_its_weight_is_held_for_both() -> None:
    settings = AlgorithmSettings(name="cispo", clip_low=0.4, clip_high=0.28, correction=UNCORRECTED)
    counts = policy_loss(two_tokens(settings, [[1.5, 0.5], [1.5, 1.0]], [2.0, -1.0]), settings).counts
    assert (counts.num_clipped_high, counts.num_clipped_low) == (2, 1)
    nothing = policy_loss(two_tokens(settings, [[1.5, 0.5], [1.5, 1.0]], [0.0, 0.0]), settings).counts
    assert nothing.clipped_fraction == 0.0


def test_a_token_gone_from_impossible_to_likely_does_not_overflow_the_loss() -> None:
    settings = AlgorithmSettings(correction=UNCORRECTED)
    tokens = two_tokens(settings, [[1.0, 1.0], [1.0, 1.0]], [-1.0, -1.0])
    far = PolicyTokens(
        tokens.current_BT,
        tokens.behaviour_BT,
        tokens.mask_BT,
        tokens.share_BT,
        tokens.advantage_B,
        tokens.current_BT.detach() - 900.0,
    )
    loss = policy_loss(far, settings).total
    (gradient,) = torch.autograd.grad(loss, far.current_BT)
    assert loss.item() == pytest.approx(exp(20.0))
    assert bool(torch.isfinite(gradient).all())


def test_shares_sum_to_what_their_algorithm_says() -> None:
    mask = torch.tensor([[True, True, True, True], [True, False, False, False]])
    each = torch.arange(2)
    torch.testing.assert_close(shares("token", mask, each, 8), torch.tensor([[0.2] * 4, [0.2, 0, 0, 0]]))
    assert shares("sequence", mask, each, 8).sum(-1).tolist() == pytest.approx([0.5, 0.5])
    assert shares("constant", mask, each, 8).sum(-1).tolist() == pytest.approx([0.25, 0.0625])
    with pytest.raises(RolloutError, match="4 tokens where 3 are allowed"):
        shares("token", mask, each, 3)
    with pytest.raises(RolloutError, match="5 tokens where 4 are allowed"):
        shares("token", mask, torch.zeros(2, dtype=torch.int64), 4)


@pytest.mark.parametrize("seed", range(5))
def test_shares_of_forked_rollouts_are_those_of_their_plain_statement(seed: int) -> None:
    """Of nine sequences of five rollouts; some have no token, as those of other minibatches."""
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(0, 6, (9,), generator=generator)
    rollouts_B = torch.randint(0, 5, (9,), generator=generator) * 7
    mask_BT = torch.arange(6)[None, :] < lengths_B[:, None]
    lengths, numbers = lengths_B.tolist(), rollouts_B.tolist()
    expected = {
        "token": shares_reference.token_share(lengths, numbers),
        "sequence": shares_reference.sequence_share(lengths, numbers),
        "constant": shares_reference.constant_share(lengths, numbers, 60),
    }
    kinds: tuple[Share, ...] = ("token", "sequence", "constant")
    for kind in kinds:
        found_BT = shares(kind, mask_BT, rollouts_B, 60)
        torch.testing.assert_close(found_BT, torch.tensor(expected[kind])[:, None] * mask_BT)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_a_forked_rollout_weighs_as_the_one_sequence_it_would_have_been(name: str) -> None:
    """Five sequences of three rollouts: the loss is that of three, each with the tokens of all its own."""
    settings = AlgorithmSettings(name=name, correction=UNCORRECTED)
    tokens = make_tokens(3, settings)
    of_rollout = [0, 1, 1, 2, 1]
    tokens = replace(
        tokens,
        share_BT=shares(settings.recipe.share, tokens.mask_BT, torch.tensor(of_rollout), 40),
        advantage_B=torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)[of_rollout],
    )
    parts = rollouts(tokens)
    joined = [_joined([part for part, number in zip(parts, of_rollout, strict=True) if number == one]) for one in range(3)]
    low, high = settings.recipe.clip_low, settings.recipe.clip_high
    if name == "grpo":
        expected = reference.grpo(joined, reference.plain, low, high)
    else:
        expected = reference.dr_grpo(joined, reference.plain, low, high, 40)
    assert_equals_reference(tokens, settings, expected)


def _joined(parts: list[Rollout]) -> Rollout:
    return Rollout(
        current=[logprob for part in parts for logprob in part.current],
        proximal=[logprob for part in parts for logprob in part.proximal],
        behaviour=[logprob for part in parts for logprob in part.behaviour],
        reference=[logprob for part in parts for logprob in part.reference],
        advantage=parts[0].advantage,
    )


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    settings = AlgorithmSettings(kl_weight=0.1)
    tokens = two_tokens(settings, [[1.0, 1.0]] * 2, [1.0, 1.0])
    with pytest.raises(RolloutError, match="no reference log-probabilities"):
        policy_loss(tokens, settings)
    with pytest.raises(RolloutError, match=r"behaviour_BT is \[2, 1\]"):
        PolicyTokens(tokens.current_BT, tokens.behaviour_BT[:, :1], tokens.mask_BT, tokens.share_BT, tokens.advantage_B)
    with pytest.raises(RolloutError, match=r"advantage_B is \[1\]"):
        PolicyTokens(tokens.current_BT, tokens.behaviour_BT, tokens.mask_BT, tokens.share_BT, tokens.advantage_B[:1])
    with pytest.raises(RolloutError, match=r"mask_BT is torch\.int64"):
        PolicyTokens(tokens.current_BT, tokens.behaviour_BT, tokens.mask_BT.long(), tokens.share_BT, tokens.advantage_B)


def test_settings_replace_their_algorithms_own_and_impossible_ones_are_refused() -> None:
    assert AlgorithmSettings(name="gspo").recipe.clip_high == 4e-4
    assert AlgorithmSettings(name="gspo", clip_high=0.1).recipe.clip_high == 0.1
    assert AlgorithmSettings(name="grpo", advantage="mean").recipe.advantage == "mean"
    with pytest.raises(ConfigError, match="around 1"):
        CorrectionSettings.build({"sequence_band": [1.01, 1.2]}, source="test")
    with pytest.raises(ConfigError, match="unknown key"):
        AlgorithmSettings.build({"clip": 0.2}, source="test")
