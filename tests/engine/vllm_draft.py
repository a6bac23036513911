"""`python vllm_draft.py TARGET DRAFT IN OUT`: what vLLM's own EAGLE-3 class computes of a draft directory, without an engine.

IN holds `tokens_T` (T + 1 ids) and `aux_TX`; OUT gets `first_TV`, logits over the target's vocabulary of every row, and
`second_TV`, those of one more step after each row but the last. Only the attention kernel is replaced, by torch's, because it
wants an engine's KV cache.

Shape letters: T rows, X aux layers times D, D hidden, V target vocabulary.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


def build_draft(target_dir: Path, draft_dir: Path) -> tuple[torch.nn.Module, Any]:
    """The draft as an engine loads it, sharing the target's embedding, and vLLM's configuration."""
    import vllm.v1.worker.cpu.shm  # noqa: F401  (stands in for torch's accelerator where there is none)
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.platforms import current_platform

    speculative = {"method": "eagle3", "model": str(draft_dir), "num_speculative_tokens": 3}
    arguments = EngineArgs(
        model=str(target_dir),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        speculative_config=speculative,
    )
    config = arguments.create_engine_config()
    current_platform.import_kernels()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as directory:
        init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        target = get_model(vllm_config=config)
        draft = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
    assert draft.has_own_lm_head
    del draft.model.embed_tokens
    draft.model.embed_tokens = target.model.embed_tokens
    attention = draft.model.layers[0].self_attn
    attention.attn.forward = lambda *states: attend(*states, attention.num_heads, attention.num_kv_heads, attention.head_dim)
    return draft, config


def attend(queries: Tensor, keys: Tensor, values: Tensor, num_heads: int, num_kv_heads: int, width: int) -> Tensor:
    """Causal attention, [T, heads times width] each."""
    shaped = [
        states.view(len(states), count, width).transpose(0, 1)
        for states, count in ((queries, num_heads), (keys, num_kv_heads), (values, num_kv_heads))
    ]
    out: Tensor = functional.scaled_dot_product_attention(*shaped, is_causal=True, enable_gqa=True)
    return out.transpose(0, 1).reshape(len(queries), -1)


@torch.inference_mode()
def compute(draft: torch.nn.Module, config: Any, tokens_T: Tensor, aux_TX: Tensor) -> dict[str, Tensor]:
    from vllm.forward_context import set_forward_context

    with set_forward_context(None, config):
        return unroll(draft, tokens_T, aux_TX)


def unroll(draft: torch.nn.Module, tokens_T: Tensor, aux_TX: Tensor) -> dict[str, Tensor]:
    num_rows = len(aux_TX)
    features_TD = draft.combine_hidden_states(aux_TX)
    output_TD, next_TD = draft.model.forward(tokens_T[1:], torch.arange(num_rows), features_TD)
    second = []
    for row in range(num_rows - 1):
        hidden = torch.cat([features_TD[: row + 1], next_TD[row : row + 1]])
        further_TD, _ = draft.model.forward(tokens_T[1 : row + 3], torch.arange(row + 2), hidden)
        second.append(draft.compute_logits(further_TD[-1:]))
    return {"first_TV": draft.compute_logits(output_TD), "second_TV": torch.cat(second)}


if __name__ == "__main__":
    target_dir, draft_dir, in_file, out_file = map(Path, sys.argv[1:])
    save_file(compute(*build_draft(target_dir, draft_dir), **load_file(in_file)), out_file)
    sys.stdout.flush()
    os._exit(0)  # vLLM's process groups would complain that nobody took them down
