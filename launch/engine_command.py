"""The command line and environment of one engine: stock `vllm serve` with Paceline's parts named in options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.config import LOOPBACK, PoolSettings, SystemConfig
from launch.host import HostFacts
from launch.rundir import Tokens
from server.config import KV_LEASE_S, KV_STORE_DIRECTORY, EngineEndpoint, EnginePartsConfig
from wire.environment import ENGINE_TOKEN_VARIABLE
from wire.errors import ConfigError

ENGINE_MODULE = "server.engine.serve"
PLUGINS = "paceline,paceline_control"
CPU_WORKER = "server.engine.worker_cpu.PacelineCpuWorker"
GPU_WORKER = "server.engine.worker_gpu.PacelineGpuWorker"

_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}

_CPU_DEFAULTS: dict[str, Any] = {"block_size": 32, "kv_cache_memory_bytes": 1 << 30}
_DEFAULTS: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "enable_prefix_caching": True,
    "enable_prompt_tokens_details": True,
    # A progress bar raises where its log cannot be written: with it an engine would not start on a full disk.
    "use_tqdm_on_load": False,
}
_ROLLOUTS: dict[str, Any] = {
    "enable_scale_out": True,
    "logprobs_mode": "processed_logprobs",
    "scheduling_policy": "priority",
}
"""What `/inference/v1/generate` needs; the gateway refuses rollouts where an engine was started without."""
_OWNED = {
    "model": "target.path",
    "host": "nothing: engines listen on loopback only",
    "port": "pool.port",
    "dtype": "target.dtype",
    "worker_cls": "nothing: it is Paceline's worker",
    "weight_transfer_config": "nothing: it is Paceline's back end",
    "enable_chunked_prefill": "nothing: it is on, or a long prompt would hold up every answer beside it for one whole step",
    "speculative_config": "draft.num_speculative_tokens",
    "served_model_name": "target.path",
    "kv_transfer_config": "pool.kind",
    # Capture and swaps know one rank that samples and one draft, which stages would not share.
    "pipeline_parallel_size": "pool.gpus, which are one tensor-parallel group",
    "kv_events_config": "nothing: engines tell the gateway what they cache where there are several",
}
"""Options that other tables or the launcher decide, and which setting to use instead."""


def engine_argv(
    config: SystemConfig, host: HostFacts, *, pool: PoolSettings, endpoint: EngineEndpoint, target_dir: Path, draft_link: Path
) -> list[str]:
    """argv of one engine; raises ConfigError where `[engine]` sets an option that is not its to set, or misspells one."""
    for key in config.engine:
        if "-" in key:
            raise ConfigError(f"engine.{key}: options of `vllm serve` are spelled engine.{key.replace('-', '_')} here")
        if key in _OWNED:
            raise ConfigError(f"engine.{key} cannot be set; use {_OWNED[key]}")
    ranks = {"tensor_parallel_size": len(pool.gpus)} if pool.gpus else {}
    rollouts = _ROLLOUTS if config.rollouts.enabled else {}
    options = _DEFAULTS | ranks | rollouts | ({} if host.is_cuda else _CPU_DEFAULTS) | config.engine
    schedule = depth_schedule(
        config.draft.num_speculative_tokens, max_num_seqs=int(options["max_num_seqs"]), every_depth=host.is_cuda
    )
    owned: dict[str, Any] = {
        "host": LOOPBACK,
        "port": pool.port,
        "served_model_name": target_dir.name,
        "dtype": config.target.dtype,
        "worker_cls": GPU_WORKER if host.is_cuda else CPU_WORKER,
        "weight_transfer_config": {"backend": "paceline"},
        "enable_chunked_prefill": True,
        "speculative_config": {
            "method": "eagle3",
            "model": str(draft_link),
            "num_speculative_tokens": config.draft.num_speculative_tokens,
            "num_speculative_tokens_per_batch_size": schedule,
        },
    }
    if config.publishes_kv_events:
        owned["kv_events_config"] = kv_events_config(config, endpoint)
    if config.transfers_kv(pool):
        owned["kv_transfer_config"] = nixl_connector(pool, host)
    elif config.kv_store.enabled:
        owned["kv_transfer_config"] = store_connector(config)
    return [host.python, "-m", ENGINE_MODULE, str(target_dir), *as_flags(owned | options)]


def depth_schedule(depth: int, *, max_num_seqs: int, every_depth: bool) -> list[list[int]]:
    """K by batch size, `[first, last, K]`.

    On a CPU the schedule is constant (a shrinking one feeds placeholder drafts to the sampler there). On CUDA every K down
    to 0 must occur once, because graphs are captured only for depths the schedule names.
    """
    if not every_depth:
        return [[1, max_num_seqs, depth]]
    shrinking = range(depth - 1, -1, -1)[: max_num_seqs - 1]
    first_end = max_num_seqs - len(shrinking)
    return [[1, first_end, depth], *([first_end + 1 + i, first_end + 1 + i, k] for i, k in enumerate(shrinking))]


def kv_events_config(config: SystemConfig, endpoint: EngineEndpoint) -> dict[str, Any]:
    """The engine's publisher connects to the gateway, which so finds every engine at one address; only replay is bound."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": config.kv_events_endpoint,
        "topic": f"kv@{endpoint.id}",
        "replay_endpoint": endpoint.kv_replay_endpoint,
    }


def store_connector(config: SystemConfig) -> dict[str, Any]:
    """KV of finished conversations on a path or in DFKV."""
    store = config.kv_store
    place: dict[str, Any] = {"directory": str(config.state.directory / KV_STORE_DIRECTORY), "max_bytes": store.max_bytes}
    if store.dfkv is not None:
        place = {"dfkv": store.dfkv.model_dump()}
    return {
        "kv_connector": "PacelineKvStore",
        "kv_connector_module_path": "server.engine.kv_store_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": place,
    }


def nixl_connector(pool: PoolSettings, host: HostFacts) -> dict[str, Any]:
    """NIXL, decode pulls from prefill. What cannot be pulled is computed anew: losing a prefill engine costs time, not an answer."""
    return {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "server.engine.nixl_connector",
        "kv_role": _KV_ROLES[pool.kind],
        "kv_buffer_device": "cuda" if host.is_cuda else "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": KV_LEASE_S},
    }


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Options in the spelling of `vllm serve`: booleans as --x or --no-x, tables as JSON, lists as several words."""
    flags: list[str] = []
    for key, value in options.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, Mapping):
            flags += [f"--{name}", json.dumps(value, separators=(",", ":"))]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            flags += [f"--{name}", *(str(item) for item in value)]
        else:
            flags += [f"--{name}", str(value)]
    return flags


def engine_env(
    config: SystemConfig, parts: EnginePartsConfig, host: HostFacts, tokens: Tokens, *, pool: PoolSettings, cores: Sequence[int]
) -> dict[str, str]:
    """Environment of one engine on top of the caller's; raises ConfigError where it names GPUs on a CPU build."""
    env = {
        "PACELINE_ENGINE_CONFIG": parts.model_dump_json(),
        ENGINE_TOKEN_VARIABLE: tokens.engine,
        "VLLM_PLUGINS": PLUGINS,
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if parts.target_dir.is_absolute():
        env["HF_HUB_OFFLINE"] = "1"
    if config.transfers_kv(pool):
        env |= kv_transfer_env(pool, host)
    return env | (_cuda_env(pool) if host.is_cuda else _cpu_env(host, pool=pool, cores=cores))


def kv_transfer_env(pool: PoolSettings, host: HostFacts) -> dict[str, str]:
    """What NIXL reads: where this engine answers handshakes; on a CPU also the transports that need no fabric.

    UCX would listen on every network interface: engines of one CPU machine need the loopback one only.
    """
    side_channel = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(pool.side_channel_port),
    }
    return side_channel if host.is_cuda else side_channel | {"UCX_TLS": "tcp,sm,self", "UCX_NET_DEVICES": "lo"}


def _cuda_env(pool: PoolSettings) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, pool.gpus))} if pool.gpus else {}


def _cpu_env(host: HostFacts, *, pool: PoolSettings, cores: Sequence[int]) -> dict[str, str]:
    if pool.gpus:
        raise ConfigError(f"pool {pool.id} asks for gpus {list(pool.gpus)}, but the CPU build of vLLM is installed; use cores")
    env = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "OMP_NUM_THREADS": str(len(cores))}
    if host.openmp_preload is not None:
        env["LD_PRELOAD"] = str(host.openmp_preload)
    return env
