"""A tiny policy on disk, and rollouts drawn from it. As a program it trains and checkpoints until it is killed: `tiny_policy.py DIR`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from itertools import count, cycle
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

from rl_samples import make_trajectory, make_turn

from rl.algorithms.config import AlgorithmSettings
from rl.staleness.ledger import LedgerState
from rl.trainer.checkpoint import Checkpoints
from rl.trainer.config import TrainerSettings
from rl.trainer.sink import StoreSink
from rl.trainer.trainer import Trainer
from rl.trajectory import Group, RewardPart, Turn
from wire.artifact import CONFIG_FILE, WEIGHTS_FILE
from wire.target import TargetStore

torch.set_num_threads(1)
VOCAB = 24
PROGRAM_SETTINGS = {"num_minibatches": 2, "warmup_steps": 1000, "learning_rate": 1.0}
"""Every step differs from the one before in order and rate."""
CANARY_IDS = (1, 5, 9, 9)
Reward = Callable[[Sequence[int]], float]


def write_policy(directory: Path, *, tied: bool = False, vocab_size: int = VOCAB) -> Path:
    """A Llama with random weights, always the same ones."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def make_settings(algorithm: dict[str, Any] | None = None, **settings: Any) -> tuple[TrainerSettings, AlgorithmSettings]:
    """On the tokens' own probabilities, unless a test wants another correction."""
    plain = {"correction": {"token_weight": "none", "sequence_band": None}}
    common: dict[str, Any] = {"learning_rate": 1e-2, "max_output_tokens": 16, "pack_tokens": 64, "clip_norm": 1e9}
    return (
        TrainerSettings.build(common | settings, source="test"),
        AlgorithmSettings.build(plain | (algorithm or {}), source="test"),
    )


def make_trainer(model_dir: Path, *, algorithm: dict[str, Any] | None = None, **settings: Any) -> Trainer:
    return Trainer(model_dir, *make_settings(algorithm, **settings))


def make_sink(state_dir: Path, model_dir: Path, *, dtype: str = "float32") -> StoreSink:
    return StoreSink(TargetStore(state_dir), model_dir, canary_token_ids=CANARY_IDS, dtype=dtype)


def model_of(sink: StoreSink, version: int, model_dir: Path, directory: Path) -> Path:
    """A version as a model of its own."""
    directory.mkdir()
    shutil.copy(model_dir / CONFIG_FILE, directory)
    shutil.copy(sink.store.weights(version), directory / WEIGHTS_FILE)
    return directory


@torch.no_grad()
def draw(trainer: Trainer, context: list[int], num_tokens: int, temperature: float, generator: torch.Generator) -> Turn:
    """Tokens and log-probabilities of the trainer's own policy, one forward pass for each."""
    prompt, outputs, logprobs = tuple(context), [], []
    for _ in range(num_tokens):
        logits_V = trainer.policy.model(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1]
        logprobs_V = (logits_V / temperature).log_softmax(-1)
        token = int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
        context = [*context, token]
        outputs.append(token)
        logprobs.append(min(0.0, float(logprobs_V[token])))
    versions = [trainer.version] * num_tokens
    return make_turn(versions, prompt_token_ids=prompt, output_token_ids=tuple(outputs), behaviour_logprobs=tuple(logprobs))


def draw_group(
    trainer: Trainer,
    group_id: int,
    prompt: Sequence[int],
    lengths: Sequence[int],
    reward: Reward,
    generator: torch.Generator,
    *,
    temperature: float = 1.0,
) -> Group:
    """One rollout of each length."""
    trajectories = []
    for index, length in enumerate(lengths):
        turn = draw(trainer, list(prompt), length, temperature, generator)
        trajectories.append(
            make_trajectory(
                group_id=group_id,
                sample_index=index,
                temperature=temperature,
                turns=(turn,),
                reward_parts=(RewardPart("right", reward(turn.output_token_ids)),),
            )
        )
    return Group(trajectories=tuple(trajectories))


def alternating() -> Reward:
    """Rewards 0, 1, 0, 1, ... whatever the answer."""
    values = cycle([0.0, 1.0])
    return lambda tokens: next(values)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.policy.parameters().items()}


def batch_of(trainer: Trainer, step: int) -> list[Group]:
    """A batch that depends on nothing but the policy and the step."""
    generator = torch.Generator().manual_seed(step)
    return [draw_group(trainer, n, [1, 2, 3 + n], [2, 3, 4, 5], alternating(), generator) for n in range(2)]


def train_until_killed(directory: Path) -> None:
    trainer = make_trainer(directory / "model", **PROGRAM_SETTINGS)
    checkpoints = Checkpoints(directory / "checkpoints", num_kept=2)
    for step in count():
        trainer.step(batch_of(trainer, step))
        checkpoints.save(trainer, LedgerState(version=step))


if __name__ == "__main__":
    train_until_killed(Path(sys.argv[1]))
