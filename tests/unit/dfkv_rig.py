"""DFKV for tests: a stand-in library over a directory, and the real one with a server where $PACELINE_DFKV_BUILD names a build.

unshare -n bash -c 'ip link set lo up; PACELINE_DFKV_BUILD=DIR pytest …'     its server listens on all addresses
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from wire.dfkv import DfkvClient, DfkvSettings

BUILD_VARIABLE = "PACELINE_DFKV_BUILD"
"""A directory with `libdfkv.so` and `dfkv_server` of github.com/dingodb/dfkv."""
KINDS = ("stand-in", "real")


class StandIn:
    """The stand-in over `directory`, which tells its clients what is wrong with it."""

    def __init__(self, library: Path, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self.settings = DfkvSettings(members=f"{directory}=127.0.0.1:1", library=str(library))

    def client(self) -> DfkvClient:
        return DfkvClient(self.settings)

    def kill(self) -> None:
        (self._directory / "dead").touch()

    def hang(self) -> None:
        (self._directory / "hung").touch()

    def wake(self) -> None:
        (self._directory / "hung").unlink(missing_ok=True)


class Real:
    """One server of DFKV."""

    def __init__(self, build: Path, server: subprocess.Popen[str], port: int) -> None:
        self._server = server
        self.settings = DfkvSettings(members=f"n1=127.0.0.1:{port}", library=str(build / "libdfkv.so"))

    def client(self) -> DfkvClient:
        return DfkvClient(self.settings)

    def kill(self) -> None:
        self._server.kill()
        self._server.wait()

    def hang(self) -> None:
        self._server.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._server.send_signal(signal.SIGCONT)


Dfkv = StandIn | Real


def stand_in_library(tmp_path: Path) -> Path:
    """Compiled once a session; skips the test where there is no compiler."""
    library = tmp_path.parent / "libdfkv.so"
    if not library.exists():
        compiler = shutil.which("gcc")
        if compiler is None:
            pytest.skip("the stand-in for libdfkv.so needs gcc")
        source = Path(__file__).with_name("dfkv_stand_in.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    return library


@contextmanager
def running(kind: str, tmp_path: Path) -> Iterator[Dfkv]:
    """An empty DFKV of one of `KINDS`."""
    if kind == "stand-in":
        dfkv = StandIn(stand_in_library(tmp_path), tmp_path / "dfkv")
        yield dfkv
        dfkv.wake()
        return
    build = os.environ.get(BUILD_VARIABLE)
    if not build:
        pytest.skip(f"${BUILD_VARIABLE} names no build of DFKV")
    directory = tmp_path / "dfkv"
    directory.mkdir()
    command = [str(Path(build) / "dfkv_server"), "--dir", str(directory), "--port", "0", "--cap", str(1 << 30)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            yield Real(Path(build), server, int(server.stdout.readline().removeprefix("PORT ")))
        finally:
            server.send_signal(signal.SIGCONT)
            server.kill()
