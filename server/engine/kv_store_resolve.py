"""Which KV may stand in for which, read off vLLM's resolved configuration."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec
import vllm
from vllm.platforms import current_platform

from server.engine.kv_store_layout import KvStoreLayout
from server.engine.settings import parts_config
from wire.errors import ConfigError
from wire.spec import weights_revision

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def resolve_layout(config: VllmConfig, cache: KVCacheConfig) -> KvStoreLayout:
    """The same in the scheduler and in every worker; raises ConfigError where the store cannot serve this engine."""
    transfer = config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError("the KV store needs kv_load_failure_policy `recompute`: a lost block must cost time, not an answer")
    if len(cache.kv_cache_groups) != 1:
        raise ConfigError(
            f"this model has {len(cache.kv_cache_groups)} kinds of KV cache, the KV store knows models with one; turn it off"
        )
    target_dir, parallel, speculative = parts_config().target_dir, config.parallel_config, config.speculative_config
    return KvStoreLayout(
        model=target_dir.name,
        layout_hash=_digest(config, weights_revision(target_dir)),
        block_size_tokens=config.cache_config.block_size,
        num_ranks=parallel.world_size,
        drops_last_block=speculative is not None and speculative.use_eagle_block_drop(),
    )


def _digest(config: VllmConfig, revision: str) -> str:
    """16 hex digits over what the bytes of a block depend on. A file's tensors are compared with the cache besides."""
    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    facts: list[Any] = [
        vllm.__version__,
        revision,
        # As vLLM resolved it, overrides applied: position encodings decide what KV holds.
        model.hf_config.to_json_string(use_diff=False),
        str(model.quantization),
        str(model.dtype),
        cache.cache_dtype,
        cache.block_size,
        [parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.decode_context_parallel_size],
        current_platform.device_type,
        _packing(config),
        _draft_geometry(config),
    ]
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]


def _packing(config: VllmConfig) -> str:
    """How the attention kernel orders the bytes of a block. It follows the machine: the GPU, or the CPU's instruction set."""
    if current_platform.device_type != "cpu":
        return f"{config.attention_config.backend} {current_platform.get_device_name()}"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = config.model_config, config.cache_config
    return str(_get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype))


def _draft_geometry(config: VllmConfig) -> list[Any]:
    """Of the draft, whose KV is stored too. Its weights do not count: another draft's KV is slower, never wrong."""
    speculative = config.speculative_config
    if speculative is None or speculative.draft_model_config is None:
        return []
    draft = speculative.draft_model_config
    layers = draft.get_num_layers(config.parallel_config)
    return [speculative.method, layers, draft.get_total_num_kv_heads(), draft.get_head_size()]
