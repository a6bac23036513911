from __future__ import annotations

import pytest
import torch
from torch import nn

from learner.newton_schulz import orthogonalise, orthogonalise_plainly
from learner.optimiser import DraftOptimiser


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def build(core: nn.Module) -> DraftOptimiser:
    return DraftOptimiser(core, muon_rate=0.02, adamw_rate=1e-2, momentum=0.95, clip_norm=1.0)


def train(core: nn.Module, optimiser: DraftOptimiser, steps: int, seed: int = 1, rate_share: float = 1.0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 8, generator=generator)
    y = x[:, :4].sin()
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = (core(x) - y).square().mean()
        loss.backward()
        optimiser.clip()
        optimiser.step(rate_share)
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 16)])
def test_orthogonalised_matrix_has_singular_values_near_one(shape):
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape, generator=torch.Generator().manual_seed(1))))
    assert values.max() < 1.3
    assert values.min() > 0.3


@pytest.mark.parametrize("shape", [(200, 600), (600, 200), (300, 300), (64, 400), (576, 1152)])
@pytest.mark.parametrize("decay", [0.0, 0.02, 0.1])
def test_the_fast_iteration_is_the_plain_one(shape, decay):
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(shape, generator=generator)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    spectrum = (-decay * torch.arange(min(shape))).exp()  # a gradient has few large singular values and many small ones
    matrix = left @ (spectrum[:, None] * right)
    plain = orthogonalise_plainly(matrix)
    assert float((orthogonalise(matrix) - plain).norm() / plain.norm()) < 0.04


def test_loss_falls():
    core = model()
    losses = train(core, build(core), 60)
    assert losses[-1] < losses[0] / 4


def test_state_survives_saving_and_training_goes_on_identically():
    first = model()
    optimiser = build(first)
    train(first, optimiser, 5)
    second = model()
    second.load_state_dict(first.state_dict())
    other = build(second)
    other.load({name: value.clone() for name, value in optimiser.tensors().items()})
    assert train(first, optimiser, 5) == train(second, other, 5)


def test_state_of_another_shape_is_refused():
    optimiser = build(model())
    tensors = optimiser.tensors() | {"muon.0.weight": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match=r"muon\.0\.weight"):
        optimiser.load(tensors)


@pytest.mark.parametrize(("rate_scale", "rate_share"), [(0.5, 1.0), (1.0, 0.5)])
def test_half_the_rate_makes_half_the_step(rate_scale, rate_share):
    def moved(scale: float, share: float) -> torch.Tensor:
        core = model()
        before = core[0].weight.detach().clone()
        optimiser = build(core)
        optimiser.rate_scale = scale
        train(core, optimiser, 1, rate_share=share)
        return core[0].weight.detach() - before

    torch.testing.assert_close(moved(rate_scale, rate_share), moved(1.0, 1.0) / 2)


def test_a_broken_gradient_shows_in_the_norm():
    core = model()
    optimiser = build(core)
    core(torch.full((1, 8), float("nan"))).sum().backward()
    assert not torch.tensor(optimiser.clip()).isfinite()
