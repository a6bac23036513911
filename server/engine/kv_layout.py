"""What this engine's KV cache is made of, as the gateway compares it and prices a transfer by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import iter_layer_specs

from wire.control import KvLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


def kv_layout(cache: KVCacheConfig, config: VllmConfig) -> KvLayout:
    """Of one rank, which holds its share of the heads."""
    transfer = config.kv_transfer_config
    return KvLayout(
        block_size_tokens=config.cache_config.block_size,
        bytes_per_token=sum(_bytes_per_token(group) for group in cache.kv_cache_groups),
        num_blocks=cache.num_blocks,
        max_model_len=config.model_config.max_model_len,
        transfer=transfer.kv_role if transfer is not None and transfer.kv_role is not None else "none",
    )


def _bytes_per_token(group: KVCacheGroupSpec) -> int:
    """Over the layers of a group: they share one spec, or have one each."""
    specs = list(iter_layer_specs(group.kv_cache_spec))
    num_alike = len(group.layer_names) // len(specs)
    return sum(num_alike * spec.page_size_bytes // spec.block_size for spec in specs)
