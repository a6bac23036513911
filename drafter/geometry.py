"""DraftGeometry: the sizes and variants of an EAGLE-3 draft, read from the target's config.json or from a draft's own.

It also writes the config.json vLLM loads. It does not know any weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wire.errors import ArtifactError, ConfigError
from wire.spec import CaptureSpec

ARCHITECTURE = "LlamaForCausalLMEagle3"
_ROPE_KEYS = ("rope_parameters", "rope_theta", "rope_scaling")
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps")


@dataclass(frozen=True)
class DraftGeometry:
    """Sizes of the one layer, and the variants of EAGLE-3 that vLLM's `llama_eagle3.py` knows by the same names."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]
    max_positions: int
    dtype: str
    rope: Mapping[str, Any] = field(default_factory=dict)
    """The target's rope keys, as its config.json spells them."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False

    @property
    def num_aux(self) -> int:
        return len(self.aux_layer_ids)

    @property
    def aux_size(self) -> int:
        """Width of a captured aux row."""
        return self.num_aux * self.hidden_size


def geometry_for_target(target_config: Mapping[str, Any], spec: CaptureSpec) -> DraftGeometry:
    """The draft that suits a target; raises ConfigError where a key is missing or the target's shape is unusable."""
    missing = [key for key in _REQUIRED if target_config.get(key) is None]
    if missing:
        raise ConfigError(f"the target's config.json lacks {', '.join(missing)}: it is not a Llama-like decoder")
    hidden_size = int(target_config["hidden_size"])
    if hidden_size != spec.hidden_size or int(target_config["vocab_size"]) != spec.vocab_size:
        raise ConfigError(
            f"the target has hidden size {hidden_size} and vocabulary {target_config['vocab_size']}, the capture spec says "
            f"{spec.hidden_size} and {spec.vocab_size}; resolve the spec anew"
        )
    share = _rotary_share(target_config)
    if share != 1.0:
        raise ConfigError(
            f"the target rotates a share of {share:g} of each head (partial_rotary_factor), a draft here rotates all of it; "
            "use a target without partial_rotary_factor"
        )
    return _geometry(target_config, spec)


def geometry_of_draft(config: Mapping[str, Any], spec: CaptureSpec, *, who: str) -> DraftGeometry:
    """The geometry a draft's own config.json describes; raises ArtifactError naming what does not fit the target."""
    missing = [key for key in _REQUIRED if config.get(key) is None]
    if missing:
        raise ArtifactError(f"{who}: its config.json lacks {', '.join(missing)}; it is not an EAGLE-3 draft")
    num_layers = config.get("num_hidden_layers")
    if num_layers not in (None, 1):
        raise ArtifactError(f"{who} has {num_layers} layers; only one-layer drafts are supported")
    eagle = config.get("eagle_config") or {}
    aux = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids") or ()
    hidden_size = int(config["hidden_size"])
    found = {
        "hidden_size": hidden_size,
        "target_hidden_size": int(config.get("target_hidden_size") or hidden_size),
        "vocab_size": int(config["vocab_size"]),
        "draft_vocab_size": int(config.get("draft_vocab_size") or config["vocab_size"]),
        "aux_layer_ids": tuple(int(layer) for layer in aux),
        "partial_rotary_factor": _rotary_share(config),
    }
    wanted = {
        "hidden_size": spec.hidden_size,
        "target_hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "aux_layer_ids": tuple(spec.aux_layer_ids),
        "partial_rotary_factor": 1.0,
    }
    wrong = [f"{key} is {found[key]}, this system needs {wanted[key]}" for key in wanted if found[key] != wanted[key]]
    if found["draft_vocab_size"] == found["vocab_size"] == spec.vocab_size:
        wrong.append("with a head as large as the target's vLLM may share the two, and a swap would overwrite the target")
    if wrong:
        raise ArtifactError(
            f"{who} does not fit: {'; '.join(wrong)}. Set draft.vocab_size and draft.aux_layer_ids to the draft's, or use another draft"
        )
    return _geometry(
        config,
        spec,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=bool(eagle.get("norm_before_fc", config.get("norm_before_fc", False))),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
        attention_bias=bool(config.get("attention_bias", False)),
    )


def _geometry(config: Mapping[str, Any], spec: CaptureSpec, **variants: bool) -> DraftGeometry:
    """A layer of the sizes a config.json names; what must fit the target comes from the spec it was checked against."""
    num_heads = int(config["num_attention_heads"])
    return DraftGeometry(
        hidden_size=spec.hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or spec.hidden_size // num_heads),
        rms_norm_eps=float(config["rms_norm_eps"]),
        vocab_size=spec.vocab_size,
        draft_vocab_size=spec.draft_vocab_size,
        aux_layer_ids=tuple(spec.aux_layer_ids),
        max_positions=int(config.get("max_position_embeddings", 2048)),
        dtype=spec.dtype,
        rope={key: config[key] for key in _ROPE_KEYS if config.get(key) is not None},
        **variants,
    )


def _rotary_share(config: Mapping[str, Any]) -> float:
    """The share of each head that rotary embedding turns, wherever a config.json of any age puts it; 1.0 where it says none."""
    places = (config, config.get("rope_parameters") or {}, config.get("rope_scaling") or {})
    found = [place["partial_rotary_factor"] for place in places if place.get("partial_rotary_factor") is not None]
    return float(found[0]) if found else 1.0


def vllm_config(geometry: DraftGeometry) -> dict[str, Any]:
    """The config.json from which vLLM builds this draft (vllm/model_executor/models/llama_eagle3.py)."""
    aux = list(geometry.aux_layer_ids)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": geometry.hidden_size,
        "target_hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": geometry.num_heads,
        "num_key_value_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": geometry.rms_norm_eps,
        "vocab_size": geometry.vocab_size,
        "draft_vocab_size": geometry.draft_vocab_size,
        "max_position_embeddings": geometry.max_positions,
        "attention_bias": geometry.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": geometry.dtype,
        **geometry.rope,
        "num_aux_hidden_states": geometry.num_aux,
        "eagle_aux_hidden_state_layer_ids": aux,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": aux,
            "norm_before_fc": geometry.norm_before_fc,
        },
        "norm_before_residual": geometry.norm_before_residual,
        "norm_before_fc": geometry.norm_before_fc,
        "fc_norm": geometry.fc_norm,
        "norm_output": geometry.norm_output,
    }
