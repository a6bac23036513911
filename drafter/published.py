"""Published EAGLE-3 checkpoints: their config.json in the one spelling this package reads, or the reason why it cannot be.

Two layouts are in use. SafeAILab/EAGLE's is flat, a Llama config with `draft_vocab_size` (eagle/traineagle3/config.json); it
names no aux layers, and other trainers write the same with a few keys more. vllm-project/speculators' puts the layer under
`transformer_layer_config` and what belongs to EAGLE-3 beside it (speculators/models/eagle3/config.py). Defaults are those under
which vLLM serves such a checkpoint (vllm/transformers_utils/configs/speculators/algos.py, .../models/llama_eagle3.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from drafter.artifact import read_config
from wire.errors import ArtifactError
from wire.spec import default_aux_layer_ids

EAGLE = "eagle"
SPECULATORS = "speculators"

_ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLM",  # as the authors' own configs say
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "Eagle3MiniMaxM2ForCausalLM",
        "Eagle3Qwen2_5vlForCausalLM",
        "Eagle3Qwen3vlForCausalLM",
    }
)
"""What vLLM builds as the layer that `DraftCore` is."""

_NEEDED: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "mlp_bias": False,
    "bias": False,
    "qkv_bias": False,
    "is_causal": True,
    "logit_scale": 1.0,
    "quantization_config": None,
    "compression_config": None,
}
"""Keys that would change the computation, and the one value each may have; absent is that value too."""

_AUX = "eagle_aux_hidden_state_layer_ids"
_OF_SPECULATORS = ("draft_vocab_size", "target_hidden_size", _AUX)
_NORMS_OF_SPECULATORS = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
"""With vLLM's defaults."""

_SIZES = (
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
)

_ROPE_PLACES = ("rope_parameters", "rope_scaling")
_ROPE_NEEDS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
}
"""Kinds that vLLM and `Rope` turn by the same angles. Others change with the length of the context, or with images."""
_ROPE_MAY_HAVE = {"yarn": frozenset({"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"})}
_ROPE_CHECKED_ELSEWHERE = frozenset({"partial_rotary_factor"})
_DEFAULT_THETA = 10000.0


class PublishedConfig(NamedTuple):
    """Which layout it was, and the flat config `geometry_of_draft` reads."""

    layout: str
    config: dict[str, Any]


def read_published_config(directory: Path, target_config: Mapping[str, Any], *, who: str) -> PublishedConfig:
    """The config of a published draft, made whole for a target; raises ArtifactError naming all that would be served otherwise
    than it was trained."""
    config = read_config(directory, who=who)
    layout = SPECULATORS if "speculators_model_type" in config else EAGLE
    flat = _flat_of_speculators(config, who) if layout == SPECULATORS else config
    problems = list(_malformed(flat)) or list(_problems(flat))
    if problems:
        raise ArtifactError(f"{who} would not compute here what it was trained to: {'; '.join(problems)}. Use another draft")
    return PublishedConfig(layout, _for_target(flat, target_config))


def _flat_of_speculators(config: Mapping[str, Any], who: str) -> dict[str, Any]:
    kind, layer = config["speculators_model_type"], config.get("transformer_layer_config")
    if kind != "eagle3":
        raise ArtifactError(f"{who}: speculators_model_type is {kind!r}, only 'eagle3' drafts can be served; use one of these")
    if not isinstance(layer, dict):
        raise ArtifactError(f"{who}: its config.json has no transformer_layer_config; it is not what speculators writes")
    flat = {key: value for key, value in layer.items() if key != "architectures"}
    flat.update((key, config[key]) for key in _OF_SPECULATORS if config.get(key) is not None)
    flat.update((key, config.get(key, default)) for key, default in _NORMS_OF_SPECULATORS.items())
    flat.update((key, config[key]) for key in ("quantization_config", "compression_config") if key in config)
    return flat


def _malformed(flat: Mapping[str, Any]) -> Iterator[str]:
    """Values that are not what their key holds; the rest of this module relies on them."""
    for key in _SIZES:
        if flat.get(key) is not None and not (type(flat[key]) is int and flat[key] > 0):
            yield f"{key} is {flat[key]!r}, needed a whole number above 0"
    for key in ("rms_norm_eps", "rope_theta"):
        if flat.get(key) is not None and type(flat[key]) not in (int, float):
            yield f"{key} is {flat[key]!r}, needed a number"
    for key in ("attention_bias", *_NORMS_OF_SPECULATORS):
        if flat.get(key) is not None and type(flat[key]) is not bool:
            yield f"{key} is {flat[key]!r}, needed true or false"
    for key in (*_ROPE_PLACES, "eagle_config"):
        if not isinstance(flat.get(key) or {}, dict):
            yield f"{key} is {flat[key]!r}, needed an object"
    for key in ("architectures", "layer_types"):
        names = flat.get(key) or []
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            yield f"{key} is {names!r}, needed a list of names"
    nested = flat.get("eagle_config")
    for place in (flat, nested if isinstance(nested, dict) else {}):
        layers = place.get(_AUX) or []
        if not (isinstance(layers, list) and all(type(layer) is int for layer in layers)):
            yield f"{_AUX} is {layers!r}, needed a list of whole numbers"


def _problems(flat: Mapping[str, Any]) -> Iterator[str]:
    """What `DraftCore` cannot represent, one phrase each."""
    for name in flat.get("architectures") or ():
        if name not in _ARCHITECTURES:
            yield f"its architecture is {name}, known are {', '.join(sorted(_ARCHITECTURES))}"
    for key, needed in _NEEDED.items():
        if flat.get(key) is not None and flat[key] != needed:
            yield f"{key} is {flat[key]!r}, needed {'none' if needed is None else repr(needed)}"
    if (flat.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        yield "use_aux_hidden_state is False, it reads the target's last layer where captures hold aux layers"
    for kind in (flat.get("layer_types") or ())[:1]:
        if kind != "full_attention":
            yield f"its layer is {kind}, needed full_attention"
    num_heads, num_kv_heads, size = (flat.get(key) for key in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    if num_heads and num_kv_heads and num_heads % num_kv_heads:
        yield f"num_attention_heads is {num_heads} and num_key_value_heads {num_kv_heads}, which does not divide it"
    if num_heads and size and size % num_heads:
        yield f"hidden_size is {size} and num_attention_heads {num_heads}, which does not divide it (transformers' LlamaConfig)"
    yield from _rope_problems(flat)


def _rope_problems(flat: Mapping[str, Any]) -> Iterator[str]:
    rope = _rope(flat)
    kind = rope["rope_type"]
    if not isinstance(kind, str) or kind not in _ROPE_NEEDS:
        yield f"its rope_type is {kind!r}, known are {', '.join(_ROPE_NEEDS)}"
        return
    found = rope.keys() - {"rope_type", "rope_theta"} - _ROPE_CHECKED_ELSEWHERE
    missing = sorted(_ROPE_NEEDS[kind] - found)
    unknown = sorted(found - _ROPE_NEEDS[kind] - _ROPE_MAY_HAVE.get(kind, frozenset()))
    if missing:
        yield f"its {kind} rope lacks {', '.join(missing)}"
    for key in ("rope_theta", *sorted(_ROPE_NEEDS[kind] & found)):
        if type(rope[key]) not in (int, float):
            yield f"{key} of its rope is {rope[key]!r}, needed a number"
    if unknown:
        yield f"its {kind} rope has {', '.join(f'{key} = {rope[key]!r}' for key in unknown)}, which is not known"


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters in today's spelling, from a config of any age."""
    rope: dict[str, Any] = {}
    for place in _ROPE_PLACES:
        rope.update(config.get(place) or {})
    old_kind = rope.pop("type", None)
    rope.setdefault("rope_type", old_kind or "default")
    rope.setdefault("rope_theta", config.get("rope_theta") or _DEFAULT_THETA)
    return rope


def _for_target(flat: Mapping[str, Any], target_config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with what it leaves to the target filled in.

    Positions are the target's: a draft reads no others, and vLLM raises a shorter table (speculative.py, #48894). Rope that
    equals the target's takes its spelling, so that an engine running a draft of the same shape can swap this one in.
    """
    whole = {key: value for key, value in flat.items() if key not in (*_ROPE_PLACES, "rope_theta")}
    rope = _rope(flat)
    whole |= (
        {key: target_config[key] for key in (*_ROPE_PLACES, "rope_theta") if target_config.get(key) is not None}
        if rope == _rope(target_config)
        else {"rope_parameters": rope}
    )
    whole["max_position_embeddings"] = target_config.get("max_position_embeddings", 2048)
    if not (flat.get(_AUX) or (flat.get("eagle_config") or {}).get(_AUX)):
        whole[_AUX] = default_aux_layer_ids(int(target_config["num_hidden_layers"]))
    return whole
