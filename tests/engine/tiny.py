"""A tiny random Llama with its own tokenizer: everything real, small enough to start in seconds.

Its next-token distributions are peaked on few tokens and vary with the context, and a day-0 draft (which reads a late
target state) agrees with it part of the time: proposals are both accepted and rejected.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 8, 4, 2, 32
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 320
DRAFT_VOCAB = 192
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def make_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer without merges: 256 bytes, three special tokens, unused rows up to VOCAB."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[2],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 2048,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def make_target(directory: Path, *, seed: int = 0) -> Path:
    """Write the model; equal seeds give equal weights."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    # A direction all embeddings share makes hidden states, and so distributions, alike but not equal.
    embedding = normal(VOCAB, HIDDEN, std=0.5) + normal(1, HIDDEN, std=0.3)
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.full((HIDDEN,), 0.8)}
    width = HEADS * HEAD_DIM
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}self_attn.q_proj.weight": normal(width, HIDDEN, std=0.15),
            f"{prefix}self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN, std=0.15),
            f"{prefix}self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN, std=0.15),
            f"{prefix}self_attn.o_proj.weight": normal(HIDDEN, width, std=0.12),
            f"{prefix}mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN, std=0.15),
            f"{prefix}mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN, std=0.15),
            f"{prefix}mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE, std=0.12),
            f"{prefix}input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    make_tokenizer(directory)
    return directory
