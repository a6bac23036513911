"""Versions of a target and what they say, by a plain forward of Hugging Face's model."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from wire.artifact import WEIGHTS_FILE, write_manifest
from wire.spec import SCHEMA_VERSION, CaptureSpec, file_sha256
from wire.target import TargetCanary, TargetManifest, TargetStore

CANARY_IDS = (40, 90, 71, 13, 200, 150, 61, 33)


def make_moved(target: Path, directory: Path, *, seed: int) -> Path:
    """A copy of the model whose matrices have moved by a third of their spread: it says something else."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    moved = {
        name: tensor + 0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator) if tensor.ndim == 2 else tensor
        for name, tensor in load_file(target / WEIGHTS_FILE).items()
    }
    save_file(moved, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / name, directory / name)
    return directory


def publish_target(state_dir: Path, spec: CaptureSpec, model: Path) -> int:
    """That model's weights as the next version, with what it says as the canary."""
    canary = TargetCanary(token_ids=CANARY_IDS, logprobs=tuple(score(model, list(CANARY_IDS))), max_mean_error=1e-4)

    def fill(directory: Path, version: int) -> None:
        shutil.copy(model / WEIGHTS_FILE, directory / WEIGHTS_FILE)
        manifest = TargetManifest(
            schema_version=SCHEMA_VERSION,
            version=version,
            parent=version - 1,
            created_at_s=0.0,
            sha256={WEIGHTS_FILE: file_sha256(directory / WEIGHTS_FILE)},
            target_id=spec.target_id,
            base_revision=spec.target_revision,
            tokenizer_sha256=spec.tokenizer_sha256,
            canary=canary,
        )
        write_manifest(directory, manifest)

    return TargetStore(state_dir).publish(fill)


@torch.inference_mode()
def greedy(model_dir: Path, ids: list[int], num_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    output = model.generate(torch.tensor([ids]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
    return output[0, len(ids) :].tolist()


@torch.inference_mode()
def score(model_dir: Path, ids: list[int]) -> list[float]:
    """Log-probability at temperature 1 of each token but the first, given those before it."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), dim=-1)
    return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
