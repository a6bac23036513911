"""The gateway as a process: starts from its JSON, needs its tokens, ends on SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from waiting import DEADLINE_S

from server.config import GatewayConfig
from server.gateway import bind
from server.main import main
from wire.errors import ConfigError


def _config(tmp_path: Path) -> dict[str, object]:
    with socket.socket() as public, socket.socket() as admin:
        public.bind(("127.0.0.1", 0))
        admin.bind(("127.0.0.1", 0))
        ports = public.getsockname()[1], admin.getsockname()[1]
    engine = {"id": "engine-0", "url": "http://127.0.0.1:9", "events_endpoint": f"ipc://{tmp_path}/events"}
    return {
        "gateway": {"port": ports[0], "admin_port": ports[1]},
        "admission": {},
        "canary": {},
        "engines": [engine],
        "state_dir": str(tmp_path),
    }


def test_ports_send_small_answers_at_once() -> None:
    with bind("127.0.0.1", 0) as port, socket.socket() as client:
        port.listen()
        client.connect(port.getsockname())
        # asyncio switches Nagle's algorithm off on sockets that name their protocol, and on no others.
        accepted, _ = port.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP


def test_taken_port_is_a_configuration_error() -> None:
    with bind("127.0.0.1", 0) as port:
        port.listen()
        with pytest.raises(ConfigError, match="cannot listen"):
            bind("127.0.0.1", port.getsockname()[1])


def test_missing_token_is_a_configuration_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_OPERATOR_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="PACELINE_OPERATOR_TOKEN"):
        main(GatewayConfig.build(_config(tmp_path), source="test"))


def test_process_serves_and_ends_on_sigterm_without_heavy_imports(tmp_path: Path) -> None:
    config = _config(tmp_path)
    path = tmp_path / "gateway.json"
    path.write_text(json.dumps(config))
    tokens = {"PACELINE_OPERATOR_TOKEN": "operator-token", "PACELINE_ENGINE_TOKEN": "engine-token"}
    program = (
        "import sys; from pathlib import Path; from server.config import GatewayConfig; from server.main import main;"
        "code = main(GatewayConfig.read_json(Path(sys.argv[1])));"
        "heavy = {'torch', 'vllm', 'transformers', 'drafter', 'learner', 'launch'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], env=os.environ | tokens, stderr=subprocess.PIPE)
    try:
        url = f"http://127.0.0.1:{config['gateway']['port']}/health"  # type: ignore[index]
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                assert urllib.request.urlopen(url, timeout=20).status == 200
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=DEADLINE_S) == 0, process.stderr.read() if process.stderr else ""
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stderr:
            process.stderr.close()
