"""Policy: the target while it is trained, a causal language model of Hugging Face transformers read from a local directory.

Shape letters as in `rl.trainer.packs`; V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rl.trainer.config import TrainerSettings
from rl.trainer.packs import Pack
from wire.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy:
    """Weights in float32, forward passes in the settings' dtype, log-probabilities in float32. Dropout is off: the engine has none.

    Raises ConfigError where the directory's weights have other names in memory than on disk: an engine could not read them back.
    """

    def __init__(self, model_dir: Path, settings: TrainerSettings, device: torch.device) -> None:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        for name in vars(config):
            if name.endswith(("dropout", "_pdrop")):
                setattr(config, name, 0.0)
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, config=config, dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
        self.model: Any = model.to(device).train()
        if settings.recompute_activations:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.device = device
        self.vocab_size: int = config.get_text_config().vocab_size
        self._dtype = DTYPES[settings.dtype]
        self._files = _tensor_files(model_dir)
        self._require_stored(model_dir)

    def score(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """(log-probability [B, T] of each output token at its rollout's temperature, entropy [B, T] there, without gradient)."""
        with torch.autocast(self.device.type, self._dtype, enabled=self._dtype is not torch.float32):
            output = self.model(
                input_ids=pack.tokens_RL,
                position_ids=pack.positions_RL,
                attention_mask=pack.attention_RRLL,
                use_cache=False,
                logits_to_keep=pack.kept_K,
            )
        logits_MV = output.logits.flatten(0, 1)[pack.source_M].float() / pack.temperature_M[:, None]
        normaliser_M = logits_MV.logsumexp(-1)
        logprob_M = logits_MV.gather(-1, pack.next_M[:, None]).squeeze(-1) - normaliser_M
        with torch.no_grad():
            entropy_M = torch.special.entr((logits_MV - normaliser_M[:, None]).exp()).sum(-1)
        return pack.by_rollout(logprob_M), pack.by_rollout(entropy_M)

    def parameters(self) -> dict[str, Tensor]:
        """By name; a tied head is its embedding and appears once."""
        return dict(self.model.named_parameters())

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Natural log-probability at temperature 1 of each token but the first, given those before it."""
        tokens_L = torch.tensor(token_ids)
        places_M = torch.arange(len(token_ids) - 1)
        none_M = torch.zeros_like(places_M)
        pack = Pack(
            none_M[:1], tokens_L[None, :-1], places_M, places_M, tokens_L[1:], none_M, places_M, torch.ones(len(places_M))
        )
        with torch.no_grad():
            found: list[float] = self.score(pack.to(self.device))[0][0].tolist()
        return found

    def stored(self) -> dict[str, Tensor]:
        """What the model's files hold of it, by their names: a tied head appears twice where it is stored twice."""
        held = dict(self.model.named_parameters(remove_duplicate=False)) | dict(
            self.model.named_buffers(remove_duplicate=False)
        )
        return {name: held[name] for name in self._files if name in held}

    def untouched(self) -> dict[str, Tensor]:
        """Tensors of the model's files that the model does not have, as they are there."""
        names = sorted(self._files.keys() - self.stored().keys())
        found = {}
        for name in names:
            with safe_open(self._files[name], framework="pt") as opened:
                found[name] = opened.get_tensor(name)
        return found

    def _require_stored(self, model_dir: Path) -> None:
        unknown = sorted(self.parameters().keys() - self._files.keys())
        if unknown:
            raise ConfigError(
                f"{model_dir} has no weight {unknown[0]} ({len(unknown)} such): transformers holds this model under other names "
                "than its files do, and an engine could not read what is trained; use a dense model such as Llama or Qwen2"
            )


def _tensor_files(model_dir: Path) -> dict[str, Path]:
    """The file of each tensor. Where there is an index only files it names count: a directory may hold the same weights twice."""
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: model_dir / file for name, file in weight_map.items()}
    found: dict[str, Path] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            found.update(dict.fromkeys(opened.keys(), path))
    return found
