"""The plan: from a SystemConfig to the processes of a system. Pure: it reads no disk, starts nothing and writes nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from launch.config import LOOPBACK, PoolSettings, SystemConfig
from launch.cores import CoreShares, share_cores
from launch.engine_command import engine_argv, engine_env
from launch.host import HostFacts
from launch.rundir import ENGINE_TOKEN_VARIABLE, OPERATOR_TOKEN_VARIABLE, RunDir, Tokens, socket_dir
from learner.config import LearnerConfig
from server.config import EngineEndpoint, EnginePartsConfig, GatewayConfig
from wire.store import DraftStore

SECRET_VARIABLES = (OPERATOR_TOKEN_VARIABLE, ENGINE_TOKEN_VARIABLE)

STRIPPED_VARIABLES = ("VLLM_SERVER_DEV_MODE", "PYTHONPATH", "PYTHONSTARTUP", "VLLM_PLUGINS", *SECRET_VARIABLES)
"""Never inherited: dev mode opens unauthenticated control routes, a PYTHONPATH can shadow the installed packages, and a
role gets only the secrets it needs."""


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """When dependants may start."""

    kind: Literal["http", "alive"]
    """`http`: all `urls` answer 200. `alive`: the process has lived for a moment."""
    deadline_s: float
    url: str = ""
    parts_url: str = ""
    """Must answer 200 too, with the engine token; 404 means that our parts are not loaded."""


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """What happens when the process ends by itself. Nothing that ends ever stops the others."""

    is_required: bool
    """The start of the system fails without it. Afterwards it is restarted like the others."""
    max_backoff_s: float


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One process to start."""

    name: str
    role: Literal["engine", "gateway", "learner"]
    argv: tuple[str, ...]
    env: dict[str, str]
    """Set on top of the caller's environment less STRIPPED_VARIABLES."""
    cores: tuple[int, ...]
    """Where it computes; empty: unpinned."""
    is_bound: bool = False
    """The supervisor binds the whole process to `cores` (an engine binds its compute threads itself)."""
    nice: int = 0
    log_file: Path
    readiness: Readiness
    restart: RestartPolicy
    memory_note: str


@dataclass(frozen=True, kw_only=True)
class SystemPlan:
    """All processes in start order, and the resolved configuration files they read."""

    state_dir: Path
    target_dir: Path
    gateway_url: str
    admin_url: str
    engines: tuple[EngineEndpoint, ...]
    socket_dir: Path
    processes: tuple[ProcessSpec, ...]
    role_files: dict[Path, str] = field(default_factory=dict)


def make_plan(config: SystemConfig, host: HostFacts, tokens: Tokens, *, target_dir: Path) -> SystemPlan:
    """The plan of `config` on `host`; raises ConfigError. Ports must be resolved already."""
    run_dir = RunDir(config.state.directory)
    sockets = socket_dir(run_dir.run, host.temp_dir)
    shares = share_cores(config, host.cores)
    endpoints = tuple(
        EngineEndpoint(
            id=pool.id,
            kind=pool.kind,
            url=f"http://{LOOPBACK}:{pool.port}",
            events_endpoint=f"ipc://{sockets}/{pool.id}.sock",
            kv_replay_endpoint=f"ipc://{sockets}/{pool.id}-kv.sock" if config.publishes_kv_events else "",
        )
        for pool in config.pool
    )
    capture_endpoint = f"ipc://{sockets}/capture.sock"
    gateway = config.gateway
    admin_url = f"http://{reachable(gateway.admin_host)}:{gateway.admin_port}"

    gateway_config = GatewayConfig(
        gateway=gateway,
        admission=config.admission,
        canary=config.canary,
        routing=config.routing,
        kv_store=config.kv_store,
        engines=endpoints,
        kv_events_endpoint=config.kv_events_endpoint,
        target_dir=target_dir,
        state_dir=run_dir.state,
    )
    learner_config = LearnerConfig(
        learner=config.learner,
        target_dir=target_dir,
        state_dir=run_dir.state,
        capture_endpoint=capture_endpoint,
        admin_url=admin_url,
        num_speculative_tokens=config.draft.num_speculative_tokens,
    )
    role_files = {run_dir.role_file("gateway"): gateway_config.model_dump_json(indent=2)}
    processes = [
        _engine(config, host, tokens, pool=pool, endpoint=endpoint, capture_endpoint=capture_endpoint, shares=shares,
                target_dir=target_dir)
        for pool, endpoint in zip(config.pool, endpoints, strict=True)
    ]  # fmt: skip
    if config.learner.enabled:  # before the gateway: it should listen when the first request comes
        role_files[run_dir.role_file("learner")] = learner_config.model_dump_json(indent=2)
        processes.append(_learner(config, host, tokens, shares))
    processes.append(_gateway(config, host, tokens))
    return SystemPlan(
        state_dir=run_dir.state,
        target_dir=target_dir,
        gateway_url=f"http://{reachable(gateway.host)}:{gateway.port}",
        admin_url=admin_url,
        engines=endpoints,
        socket_dir=sockets,
        processes=tuple(processes),
        role_files=role_files,
    )


def reachable(host: str) -> str:
    """An address that reaches a server bound to `host` from this machine."""
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host


def _engine(
    config: SystemConfig,
    host: HostFacts,
    tokens: Tokens,
    *,
    pool: PoolSettings,
    endpoint: EngineEndpoint,
    capture_endpoint: str,
    shares: CoreShares,
    target_dir: Path,
) -> ProcessSpec:
    state = config.state.directory
    parts = EnginePartsConfig(
        engine_id=pool.id,
        state_dir=state,
        target_dir=target_dir,
        draft_vocab_size=config.draft.vocab_size,
        aux_layer_ids=config.draft.aux_layer_ids,
        capture=config.capture,
        capture_endpoint=capture_endpoint,
        events_endpoint=endpoint.events_endpoint,
    )
    cores = () if host.is_cuda else shares.pools[pool.id]
    argv = engine_argv(
        config, host, pool=pool, endpoint=endpoint, target_dir=target_dir, draft_link=DraftStore(state).active_link
    )
    return ProcessSpec(
        name=pool.id,
        role="engine",
        argv=tuple(argv),
        env=engine_env(config, parts, host, tokens, pool=pool, cores=cores),
        cores=cores,
        log_file=RunDir(state).log_file(pool.id),
        readiness=Readiness(
            kind="http",
            url=f"{endpoint.url}/health",
            parts_url=f"{endpoint.url}/paceline/status",
            deadline_s=config.launch.engine_deadline_s,
        ),
        restart=RestartPolicy(is_required=True, max_backoff_s=config.launch.max_backoff_s),
        memory_note="target and draft weights, the KV cache (engine.kv_cache_memory_bytes) and about 2 GiB for three processes",
    )


def _gateway(config: SystemConfig, host: HostFacts, tokens: Tokens) -> ProcessSpec:
    run_dir = RunDir(config.state.directory)
    gateway = config.gateway
    return ProcessSpec(
        name="gateway",
        role="gateway",
        argv=(host.python, "-m", "launch.cli", "serve", "--resolved", str(run_dir.role_file("gateway"))),
        env={OPERATOR_TOKEN_VARIABLE: tokens.operator, ENGINE_TOKEN_VARIABLE: tokens.engine},
        cores=(),
        log_file=run_dir.log_file("gateway"),
        readiness=Readiness(
            kind="http",
            url=f"http://{reachable(gateway.host)}:{gateway.port}/ready",
            deadline_s=config.launch.gateway_deadline_s,
        ),
        restart=RestartPolicy(is_required=True, max_backoff_s=config.launch.max_backoff_s),
        memory_note="about 150 MiB",
    )


def _learner(config: SystemConfig, host: HostFacts, tokens: Tokens, shares: CoreShares) -> ProcessSpec:
    run_dir = RunDir(config.state.directory)
    threads = str(config.learner.num_threads)
    return ProcessSpec(
        name="learner",
        role="learner",
        argv=(host.python, "-m", "launch.cli", "learn", "--resolved", str(run_dir.role_file("learner"))),
        env={
            OPERATOR_TOKEN_VARIABLE: tokens.operator,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
        },
        cores=shares.learner,
        is_bound=True,
        nice=config.learner.nice,
        log_file=run_dir.log_file("learner"),
        readiness=Readiness(kind="alive", deadline_s=10.0),
        restart=RestartPolicy(is_required=False, max_backoff_s=config.launch.max_backoff_s),
        memory_note="replay buffer, draft, optimiser state and the target's embedding and head: 1 to 2 GiB",
    )


def masked(spec: ProcessSpec) -> ProcessSpec:
    """The spec with its secrets hidden, fit to print."""
    env = {key: "***" if key in SECRET_VARIABLES else value for key, value in spec.env.items()}
    return ProcessSpec(**{**vars(spec), "env": env})


def plan_as_json(plan: SystemPlan) -> str:
    """Machine-readable plan, secrets masked."""
    data: dict[str, Any] = {
        "state_dir": plan.state_dir,
        "target_dir": plan.target_dir,
        "gateway_url": plan.gateway_url,
        "admin_url": plan.admin_url,
        "engines": [engine.model_dump() for engine in plan.engines],
        "processes": [asdict(masked(spec)) for spec in plan.processes],
    }
    return json.dumps(data, indent=2, default=str)


def plan_as_text(plan: SystemPlan) -> str:
    """Readable plan, secrets masked."""
    lines = [f"target   {plan.target_dir}", f"state    {plan.state_dir}", f"public   {plan.gateway_url}/v1",
             f"admin    {plan.admin_url}/admin"]  # fmt: skip
    for number, spec in enumerate(map(masked, plan.processes), start=1):
        ready = f"{spec.readiness.url} answers 200" if spec.readiness.url else "the process stays alive"
        if spec.readiness.parts_url:
            ready += f", then {spec.readiness.parts_url}"
        need = "required at start, " if spec.restart.is_required else "optional, "
        lines += [
            "",
            f"{number}. {spec.name} ({spec.role})",
            f"   cores    {', '.join(map(str, spec.cores)) or 'unpinned'}" + (f", nice {spec.nice}" if spec.nice else ""),
            f"   ready    {ready}; within {spec.readiness.deadline_s:g} s",
            f"   restart  {need}restarted with backoff up to {spec.restart.max_backoff_s:g} s",
            f"   memory   {spec.memory_note}",
            f"   log      {spec.log_file}",
            "   env      " + "\n            ".join(f"{key}={value}" for key, value in sorted(spec.env.items())),
            f"   argv     {' '.join(spec.argv[:4])}",
            *(f"            {word}" for word in _by_option(spec.argv[4:])),
        ]
    return "\n".join(lines)


def _by_option(words: tuple[str, ...]) -> list[str]:
    """argv words, an option and its values on one line."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return lines
