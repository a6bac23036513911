"""`paceline up` and `paceline down`: preconditions, the plan's files, the supervisor, and the way back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from launch import drafts, host, models, provenance
from launch.attempt import Attempt
from launch.config import SystemConfig
from launch.grow import of_another_size
from launch.plan import ProcessSpec, SystemPlan, make_plan
from launch.rundir import LaunchError, RunDir, Tokens, make_tokens, write_private
from launch.supervise import Supervisor
from wire.dfkv import load_library
from wire.errors import ArtifactError
from wire.store import DraftStore

Report = Callable[[str], None]

_STOP_MARGIN_S = 15.0


class StopFlag:
    """Set by SIGINT, SIGTERM or SIGHUP; everyone else only reads it.

    A SIGHUP that whoever started this process had it ignore, as nohup does, stays ignored.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._on_signal)

    def __call__(self) -> bool:
        return self.signal_number is not None

    def _on_signal(self, number: int, _frame: object) -> None:
        self.signal_number = number


def up(config: SystemConfig, report: Report) -> int:
    """Start the whole system and watch it until a signal; returns the exit code. Raises PacelineError."""
    stop = StopFlag()
    stop.install()
    run_dir = RunDir(config.state.directory)
    run_dir.create()
    lock = run_dir.lock()
    try:
        return _up_locked(config, run_dir, report, stop)
    finally:
        Attempt()(f"remove {run_dir.system_file}", lambda: run_dir.system_file.unlink(missing_ok=True))
        os.close(lock)


def _up_locked(config: SystemConfig, run_dir: RunDir, report: Report, stop: StopFlag) -> int:
    facts = host.gather()
    if facts.vllm_distribution is None:
        raise LaunchError("vLLM is not installed in this environment: run `make setup`, or pip install 'paceline[cpu]'")
    config = host.with_ports(config)
    refuse_busy_ports(config)
    refuse_absent_dfkv(config)
    target_dir = models.ensure(config.target.path, lambda what, _share: report(f"target: {what}"))
    tokens = make_tokens(os.environ)
    plan = make_plan(config, facts, tokens, target_dir=target_dir)
    write_run_files(plan, config, tokens)
    try:
        ensure_draft(config, report)
    except LaunchError:
        if not stop():  # the terminal's Ctrl-C ends the child that makes a draft, too
            raise
    if stop():
        return 128 + (stop.signal_number or 0)

    attempt = Attempt()

    def say(text: str) -> None:
        attempt("report", lambda: report(text))

    def describe() -> None:
        attempt(f"write {run_dir.system_file}", lambda: describe_system(run_dir, plan, supervisor))

    supervisor = Supervisor(
        plan.processes,
        base_environment=os.environ,
        grace_s=config.launch.grace_s,
        engine_token=tokens.engine,
        report=say,
        should_stop=stop,
        on_change=describe,
        before_start=lambda spec: repair_before_engine(spec, DraftStore(run_dir.state), say),
    )
    try:
        report(f"starting {', '.join(spec.name for spec in plan.processes)}; an engine on a CPU compiles for a minute or two")
        supervisor.start()
        is_ready = supervisor.is_ready
        if is_ready:
            say(f"ready: {plan.gateway_url}/v1, live page {plan.admin_url}/ui, logs {run_dir.logs}")
            supervisor.run()
        say("stopping")
    finally:
        supervisor.stop()
    say("stopped; nothing is left running")
    return 0 if is_ready else 128 + (stop.signal_number or 0)


def refuse_busy_ports(config: SystemConfig) -> None:
    """Raise LaunchError where another process listens on a port of ours, before minutes are spent on an engine."""
    wanted = config.listeners()
    busy = host.busy_ports(list(wanted.values()))
    names = [f"{name} {address[0]}:{address[1]}" for name, address in wanted.items() if address in busy]
    if names:
        raise LaunchError(
            f"{', '.join(names)}: another process holds that port, or the address is not this machine's; "
            "choose another with --set (0 takes a free one)"
        )


def refuse_absent_dfkv(config: SystemConfig) -> None:
    """Raise ConfigError where KV is to go to DFKV and its library is not there. Its servers may come later."""
    if config.kv_store.enabled and config.kv_store.dfkv is not None:
        load_library(config.kv_store.dfkv.library)


def write_run_files(plan: SystemPlan, config: SystemConfig, tokens: Tokens) -> None:
    """Everything the roles read, and what tells later what ran."""
    run_dir = RunDir(plan.state_dir)
    plan.socket_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    if plan.socket_dir.stat().st_uid != os.getuid():
        raise LaunchError(f"{plan.socket_dir} belongs to another user; choose a shorter --set state.dir=DIR")
    for path, content in plan.role_files.items():
        write_private(path, content)
    write_private(run_dir.role_file("system-config"), config.model_dump_json(indent=2))
    write_private(run_dir.operator_token_file, tokens.operator + "\n")
    provenance.write(run_dir.run / "run.json", config)


def ensure_draft(config: SystemConfig, report: Report) -> None:
    """A draft that engines can load: an active pointer, a floor, and an artifact behind them. Raises LaunchError."""
    store = DraftStore(config.state.directory)
    if not store.versions():
        origin = f"from {config.draft.checkpoint}" if config.draft.checkpoint else "at random"
        report(f"no draft yet: making one {origin}")
        resolved = RunDir(config.state.directory).role_file("system-config")
        _run_child("launch.cli", "draft", "init", "--resolved", str(resolved))
    versions = store.versions()
    if not versions:
        raise LaunchError(f"`paceline draft init` left no draft in {store.root}")
    if store.active() not in versions:
        store.set_active(versions[-1])
    if store.floor() not in versions:
        store.set_floor(versions[0])
    grow_drafts(config, store, report)


def grow_drafts(config: SystemConfig, store: DraftStore, report: Report) -> None:
    """The floor and the active draft get as many tokens as `draft.vocab_size` says. Raises LaunchError."""
    try:
        versions = of_another_size(store, config.draft.vocab_size)
    except ArtifactError:
        return  # unreadable: what happens to it is told before an engine starts
    for version in versions:
        report(f"draft {version} grows to {config.draft.vocab_size} tokens (draft.vocab_size) and keeps what it learned")
    if versions:
        _run_child("launch.grow", str(RunDir(config.state.directory).role_file("system-config")))


def _run_child(module: str, *arguments: str) -> None:
    """What imports torch runs in a child, so that the supervisor stays small. Raises LaunchError."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        command = "paceline" if module == "launch.cli" else f"python -m {module}"
        raise LaunchError(f"`{command} {' '.join(arguments[:2])}` failed:\n{(done.stderr or done.stdout).strip()[-2000:]}")


def repair_before_engine(spec: ProcessSpec, store: DraftStore, report: Report) -> None:
    """Before an engine starts: a draft it can load, if there is one. Never raises: without one the engine says what it lacks."""
    if spec.role != "engine":
        return
    try:
        drafts.repair_active(store, report)
    except (ArtifactError, OSError) as error:
        report(f"the active draft cannot be repaired: {error}")


def describe_system(run_dir: RunDir, plan: SystemPlan, supervisor: Supervisor) -> None:
    """Write `system.json`: how others find this system."""
    own = psutil.Process()
    run_dir.write_system(
        {
            "pid": own.pid,
            "pid_created_at_s": own.create_time(),
            "is_ready": supervisor.is_ready,
            "state_dir": str(plan.state_dir),
            "target_dir": str(plan.target_dir),
            "gateway_url": plan.gateway_url,
            "admin_url": plan.admin_url,
            "engines": [engine.model_dump() for engine in plan.engines],
            "processes": {watched.spec.name: watched.describe() for watched in supervisor.watched},
        }
    )


def start_detached(arguments: list[str], state_dir: Path) -> subprocess.Popen[bytes]:
    """`paceline up` in a session of its own, its words in `<state>/logs/up.log`."""
    run_dir = RunDir(state_dir)
    run_dir.create()
    with run_dir.log_file("up").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "launch.cli", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def supervisor_process(run_dir: RunDir) -> psutil.Process:
    """The running supervisor of a state directory; raises LaunchError where there is none that is surely ours."""
    description = run_dir.read_system()
    if not run_dir.is_locked():
        raise LaunchError(f"no system runs from {run_dir.state}")
    try:
        process = psutil.Process(int(description["pid"]))
        if abs(process.create_time() - float(description["pid_created_at_s"])) < 1.0:
            return process
    except psutil.NoSuchProcess:
        pass
    raise LaunchError(f"the process recorded in {run_dir.system_file} is not the one that holds the lock; nothing was stopped")


def has_ended(process: psutil.Process) -> bool:
    """A zombie has; whose parent never asks, as in some containers, it stays one."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def down(state_dir: Path, grace_s: float, report: Report) -> int:
    """Stop the system that runs from `state_dir`, if one does; raises LaunchError where it cannot be stopped."""
    run_dir = RunDir(state_dir)
    if not run_dir.is_locked():
        report(f"nothing runs from {run_dir.state}")
        return 0
    process = supervisor_process(run_dir)
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s + _STOP_MARGIN_S
    while run_dir.is_locked() or not has_ended(process):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"the supervisor (pid {process.pid}) was told to stop and still runs; its log: {run_dir.log_file('up')}"
            )
        time.sleep(0.1)
    report("stopped")
    return 0
