"""A learner of one process on a GPU does what it does on a CPU. Skipped without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_target import HIDDEN, NUM_AUX, VOCAB

from drafter.batch import RequestRows
from drafter.create import random_draft
from drafter.objectives import OBJECTIVES
from drafter.target import TargetParts
from learner.config import TrainSettings
from learner.device import choose_device
from learner.evaluate import Evaluator
from learner.ranks import OneRank
from learner.request import CapturedRequest
from learner.trainer import Trainer
from wire.spec import CaptureSpec

pytestmark = [pytest.mark.gpu]
CPU, NUM_STEPS = torch.device("cpu"), 5
EXACT = TrainSettings(bfloat16=False, muon_rate=0.0, adamw_rate=1e-3)
"""Muon's iteration makes rounding errors large; AdamW alone compares devices."""
MakeTrainer = Callable[[torch.device, TrainSettings], Trainer]


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA device on this machine")
    torch.backends.cuda.matmul.allow_tf32 = False
    return choose_device("auto", num_gpus=torch.cuda.device_count())


@pytest.fixture
def make_trainer(spec: CaptureSpec, target_dir: Path, target: TargetParts) -> MakeTrainer:
    def make(device: torch.device, settings: TrainSettings) -> Trainer:
        return Trainer(random_draft(spec, target_dir, target, seed=0), target, settings, OneRank(device))

    return make


def requests(temperature: float = 0.0) -> list[CapturedRequest]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for number in range(4):
        count = 24 + number
        rows = RequestRows(
            positions_T=torch.arange(count),
            next_tokens_T=torch.randint(0, VOCAB, (count,), generator=generator),
            aux_TX=torch.randn(count, NUM_AUX * HIDDEN, generator=generator),
            hidden_TD=torch.randn(count, HIDDEN, generator=generator),
            num_prompt_tokens=6,
            temperature=temperature,
        )
        made.append(CapturedRequest(f"r{number}", f"p{number}", "t", "d", rows, {}, 0.0))
    return made


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_steps_are_those_of_the_cpu(gpu: torch.device, make_trainer: MakeTrainer, objective: str) -> None:
    settings = EXACT.model_copy(update={"objective": objective})
    here, there = make_trainer(CPU, settings), make_trainer(gpu, settings)
    for _ in range(NUM_STEPS):
        expected, found = here.step(requests()), there.step(requests())
        assert found.loss == pytest.approx(expected.loss, rel=1e-3, abs=1e-5)
        assert found.kl == pytest.approx(expected.kl, rel=1e-3)
    for name, weight in here.candidate().core.state_dict().items():
        torch.testing.assert_close(there.candidate().core.state_dict()[name], weight, rtol=2e-2, atol=2e-3)


def test_products_in_bfloat16_leave_weights_and_optimiser_in_float32_on_the_gpu(
    gpu: torch.device, make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(gpu, TrainSettings())
    losses = [trainer.step(requests()).loss for _ in range(30)]
    assert losses[-1] < losses[0]
    assert {(weight.dtype, weight.device.type) for weight in trainer.core.parameters()} == {(torch.float32, gpu.type)}
    assert {value.device for value in trainer.tensors().values()} == {CPU}
    assert {weight.device for weight in trainer.candidate().core.parameters()} == {CPU}


@pytest.mark.parametrize("objective", ["kl", "reinforce"])
def test_a_checkpoint_of_one_device_goes_on_on_the_other(gpu: torch.device, make_trainer: MakeTrainer, objective: str) -> None:
    settings = TrainSettings(bfloat16=False, objective=objective)
    for before, after in ((CPU, gpu), (gpu, CPU)):
        first, second = make_trainer(before, settings), make_trainer(after, settings)
        first.step(requests())
        second.load(first.tensors())
        assert second.step(requests()).loss == pytest.approx(first.step(requests()).loss, rel=1e-3)
        assert {weight.device.type for weight in second.core.parameters()} == {after.type}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_judgements_are_those_of_the_cpu_and_the_draft_stays_in_host_memory(
    gpu: torch.device, make_trainer: MakeTrainer, target: TargetParts, temperature: float
) -> None:
    draft = make_trainer(CPU, EXACT).candidate()
    scores = [
        Evaluator(target, 3, dtype=torch.float32, max_context_rows=64, device=device).scores(draft, requests(temperature))
        for device in (CPU, gpu)
    ]
    assert {key: score.num_anchors for key, score in scores[0].items()} == {
        key: score.num_anchors for key, score in scores[1].items()
    }
    for key, score in scores[0].items():
        assert scores[1][key].total_length == pytest.approx(score.total_length, rel=1e-3)
    assert {weight.device for weight in draft.core.parameters()} == {CPU}


def test_a_token_the_target_lacks_ends_a_step_and_not_the_process(
    gpu: torch.device, make_trainer: MakeTrainer, target: TargetParts
) -> None:
    trainer = make_trainer(gpu, EXACT)
    good = requests()
    bad = replace(good[0], key="bad", rows=replace(good[0].rows, next_tokens_T=good[0].rows.next_tokens_T + VOCAB))
    with pytest.raises(IndexError, match=f"vocabulary of {VOCAB}"):
        trainer.step([bad])
    evaluator = Evaluator(target, 3, dtype=torch.float32, max_context_rows=64, device=gpu)
    assert list(evaluator.scores(trainer.candidate(), [bad, good[1]])) == [good[1].key]
    assert trainer.step(good).num_tokens > 0
