"""The plan: from a SystemConfig to the processes of a system. Pure: it reads no disk, starts nothing and writes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from launch.config import LOOPBACK, PoolSettings, SystemConfig
from launch.cores import share_cores
from launch.engine_command import engine_argv, engine_env
from launch.host import HostFacts
from launch.rundir import RunDir, Tokens, socket_dir
from learner.config import LearnerConfig
from server.config import EngineEndpoint, EnginePartsConfig, GatewayConfig
from wire.environment import ENGINE_TOKEN_VARIABLE, OPERATOR_TOKEN_VARIABLE
from wire.store import DraftStore

SECRET_VARIABLES = (OPERATOR_TOKEN_VARIABLE, ENGINE_TOKEN_VARIABLE)

STRIPPED_VARIABLES = ("VLLM_SERVER_DEV_MODE", "PYTHONPATH", "PYTHONSTARTUP", "VLLM_PLUGINS", *SECRET_VARIABLES)
"""Never inherited: dev mode opens unauthenticated control routes, a PYTHONPATH can shadow the installed packages, and a
role gets only the secrets it needs."""


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """When dependants may start."""

    kind: Literal["http", "alive"]
    """`http`: `url` answers 200, and `parts_url` where there is one. `alive`: the process has lived for a moment."""
    deadline_s: float
    url: str = ""
    parts_url: str = ""
    """Asked with the engine token; 404 means that our parts are not loaded."""


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
    return _Planner(config, host, tokens, target_dir).plan()


def reachable(host: str) -> str:
    """An address that reaches a server bound to `host` from this machine."""
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host


class _Planner:
    """What all processes of one system are derived from."""

    def __init__(self, config: SystemConfig, host: HostFacts, tokens: Tokens, target_dir: Path) -> None:
        self._config = config
        self._host = host
        self._tokens = tokens
        self._target_dir = target_dir
        self._run_dir = RunDir(config.state.directory)
        self._sockets = socket_dir(self._run_dir.run, host.temp_dir)
        self._shares = share_cores(config, host.cores)
        self._capture_endpoint = f"ipc://{self._sockets}/capture.sock"
        self._gateway_url = f"http://{reachable(config.gateway.host)}:{config.gateway.port}"
        self._admin_url = f"http://{reachable(config.gateway.admin_host)}:{config.gateway.admin_port}"

    def plan(self) -> SystemPlan:
        endpoints = tuple(self._endpoint(pool) for pool in self._config.pool)
        processes = [self._engine(pool, endpoint) for pool, endpoint in zip(self._config.pool, endpoints, strict=True)]
        role_files = {self._run_dir.role_file("gateway"): self._gateway_config(endpoints).model_dump_json(indent=2)}
        if self._config.learner.enabled:  # before the gateway: it should listen when the first request comes
            role_files[self._run_dir.role_file("learner")] = self._learner_config().model_dump_json(indent=2)
            processes.append(self._learner())
        processes.append(self._gateway())
        return SystemPlan(
            state_dir=self._run_dir.state,
            target_dir=self._target_dir,
            gateway_url=self._gateway_url,
            admin_url=self._admin_url,
            engines=endpoints,
            socket_dir=self._sockets,
            processes=tuple(processes),
            role_files=role_files,
        )

    def _endpoint(self, pool: PoolSettings) -> EngineEndpoint:
        return EngineEndpoint(
            id=pool.id,
            kind=pool.kind,
            url=f"http://{LOOPBACK}:{pool.port}",
            events_endpoint=f"ipc://{self._sockets}/{pool.id}.sock",
            kv_replay_endpoint=f"ipc://{self._sockets}/{pool.id}-kv.sock" if self._config.publishes_kv_events else "",
        )

    def _gateway_config(self, endpoints: tuple[EngineEndpoint, ...]) -> GatewayConfig:
        config = self._config
        return GatewayConfig(
            gateway=config.gateway,
            admission=config.admission,
            canary=config.canary,
            routing=config.routing,
            kv_store=config.kv_store,
            depth=config.depth,
            engines=endpoints,
            kv_events_endpoint=config.kv_events_endpoint,
            target_dir=self._target_dir,
            state_dir=self._run_dir.state,
        )

    def _learner_config(self) -> LearnerConfig:
        return LearnerConfig(
            learner=self._config.learner,
            target_dir=self._target_dir,
            state_dir=self._run_dir.state,
            capture_endpoint=self._capture_endpoint,
            admin_url=self._admin_url,
            num_speculative_tokens=self._config.draft.num_speculative_tokens,
        )

    def _engine(self, pool: PoolSettings, endpoint: EngineEndpoint) -> ProcessSpec:
        config, host, state_dir = self._config, self._host, self._run_dir.state
        parts = EnginePartsConfig(
            engine_id=pool.id,
            state_dir=state_dir,
            target_dir=self._target_dir,
            draft_vocab_size=config.draft.vocab_size,
            aux_layer_ids=config.draft.aux_layer_ids,
            capture=config.capture,
            capture_endpoint=self._capture_endpoint,
            events_endpoint=endpoint.events_endpoint,
        )
        cores = () if host.is_cuda else self._shares.pools[pool.id]
        draft_link = DraftStore(state_dir).active_link
        argv = engine_argv(config, host, pool=pool, endpoint=endpoint, target_dir=self._target_dir, draft_link=draft_link)
        return ProcessSpec(
            name=pool.id,
            role="engine",
            argv=tuple(argv),
            env=engine_env(config, parts, host, self._tokens, pool=pool, cores=cores),
            cores=cores,
            log_file=self._run_dir.log_file(pool.id),
            readiness=Readiness(
                kind="http",
                url=f"{endpoint.url}/health",
                parts_url=f"{endpoint.url}/paceline/status",
                deadline_s=config.launch.engine_deadline_s,
            ),
            restart=RestartPolicy(is_required=True, max_backoff_s=config.launch.max_backoff_s),
            memory_note="target and draft weights, the KV cache (engine.kv_cache_memory_bytes) and about 2 GiB for three processes",
        )

    def _gateway(self) -> ProcessSpec:
        launch = self._config.launch
        return ProcessSpec(
            name="gateway",
            role="gateway",
            argv=self._role_argv("serve", "gateway"),
            env={OPERATOR_TOKEN_VARIABLE: self._tokens.operator, ENGINE_TOKEN_VARIABLE: self._tokens.engine},
            cores=(),
            log_file=self._run_dir.log_file("gateway"),
            readiness=Readiness(kind="http", url=f"{self._gateway_url}/ready", deadline_s=launch.gateway_deadline_s),
            restart=RestartPolicy(is_required=True, max_backoff_s=launch.max_backoff_s),
            memory_note="about 150 MiB",
        )

    def _learner(self) -> ProcessSpec:
        threads = str(self._config.learner.num_threads)
        return ProcessSpec(
            name="learner",
            role="learner",
            argv=self._learner_argv(),
            env={
                OPERATOR_TOKEN_VARIABLE: self._tokens.operator,
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                "TOKENIZERS_PARALLELISM": "false",
                "GLOO_SOCKET_IFNAME": "lo",  # its processes, where there are several, talk to nobody outside
            },
            cores=self._shares.learner,
            is_bound=True,
            nice=self._config.learner.nice,
            log_file=self._run_dir.log_file("learner"),
            readiness=Readiness(kind="alive", deadline_s=10.0),
            restart=RestartPolicy(is_required=False, max_backoff_s=self._config.launch.max_backoff_s),
            memory_note="replay buffer, draft, optimiser state and the target's embedding and head: 1 to 2 GiB",
        )

    def _learner_argv(self) -> tuple[str, ...]:
        """With several processes under torchrun, which ends them all when one ends: the role starts again as a whole."""
        python, *command = self._role_argv("learn", "learner")
        if self._config.learner.num_processes == 1:
            return (python, *command)
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self._config.learner.num_processes}")
        return (python, *torchrun, *command)

    def _role_argv(self, command: str, role: str) -> tuple[str, ...]:
        return (self._host.python, "-m", "launch.cli", command, "--resolved", str(self._run_dir.role_file(role)))
