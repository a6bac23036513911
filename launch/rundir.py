"""RunDir: the part of the state directory that belongs to one running system.

<state>/run/    resolved configuration per role, tokens, sockets, system.json, the lock
<state>/logs/   one log file per role
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from wire.environment import ENGINE_TOKEN_VARIABLE, OPERATOR_TOKEN_VARIABLE
from wire.errors import PacelineError
from wire.lock_file import is_locked, take_lock

MAX_SOCKET_PATH_BYTES = 100
"""Linux allows 107 for a Unix socket; a margin for the names ZMQ may add."""


class LaunchError(PacelineError):
    """The system cannot be started, found or stopped."""

    code = "launch_failed"


@dataclass(frozen=True, kw_only=True, repr=False)
class Tokens:
    """Secrets of one running system; never printed."""

    operator: str
    """Opens the admin API."""
    engine: str
    """Opens an engine's private control routes."""


class _SystemFields(msgspec.Struct):
    """What others rely on in `system.json`; it may hold more."""

    pid: Annotated[int, msgspec.Meta(gt=0)]
    pid_created_at_s: float
    gateway_url: str
    admin_url: str


@dataclass(frozen=True)
class RunDir:
    """Paths of one state directory, and the few files the launcher itself reads and writes there."""

    state: Path

    @property
    def run(self) -> Path:
        return self.state / "run"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def system_file(self) -> Path:
        return self.run / "system.json"

    @property
    def operator_token_file(self) -> Path:
        return self.run / "operator.token"

    def role_file(self, name: str) -> Path:
        """Resolved configuration of one role."""
        return self.run / f"{name}.json"

    def log_file(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def create(self) -> None:
        for directory in (self.run, self.logs):
            directory.mkdir(parents=True, exist_ok=True)
        self.run.chmod(0o700)

    def write_system(self, description: Mapping[str, Any]) -> None:
        """Replace `system.json`, the file by which others find a running system."""
        write_private(self.system_file, json.dumps(description, indent=2) + "\n")

    def read_system(self) -> dict[str, Any]:
        """The last `system.json`; raises LaunchError where none was written, or where it is not what `up` writes."""
        try:
            content = json.loads(self.system_file.read_text())
        except (OSError, ValueError) as error:
            raise LaunchError(f"no system was started from {self.state} ({error}); start one with `paceline up`") from None
        try:
            msgspec.convert(content, _SystemFields)
        except msgspec.ValidationError as error:
            raise LaunchError(
                f"{self.system_file} is not what `paceline up` writes ({error}); "
                "end a system that still runs by a SIGTERM to its `paceline up`, then start it again"
            ) from None
        return dict(content)

    def operator_token(self) -> str:
        """The operator token: from the environment, else as `up` saved it; raises LaunchError."""
        given = os.environ.get(OPERATOR_TOKEN_VARIABLE)
        if given:
            return given
        try:
            return self.operator_token_file.read_text().strip()
        except OSError as error:
            raise LaunchError(f"no operator token: set {OPERATOR_TOKEN_VARIABLE} or start the system ({error})") from None

    def lock(self) -> int:
        """Take this state directory for one running system; held until the process ends. Raises LaunchError."""
        handle = take_lock(self._lock_file)
        if handle is None:
            raise LaunchError(
                f"a system already runs from {self.state}; stop it with `paceline down`, or use another --set state.dir=DIR"
            )
        return handle

    def is_locked(self) -> bool:
        """Whether a running system holds this state directory."""
        return is_locked(self._lock_file)

    @property
    def _lock_file(self) -> Path:
        return self.run / "lock"


def make_tokens(environment: Mapping[str, str]) -> Tokens:
    """Tokens from the environment, fresh ones where it has none."""
    return Tokens(
        operator=environment.get(OPERATOR_TOKEN_VARIABLE) or secrets.token_urlsafe(24),
        engine=environment.get(ENGINE_TOKEN_VARIABLE) or secrets.token_urlsafe(24),
    )


def socket_dir(run: Path, temp_dir: Path) -> Path:
    """Where ZMQ sockets of a run directory live: in it, or in a short private directory where its path is too long.

    The short directory's name is a hash of the run directory, so every process derives the same one.
    """
    longest = run / f"{'x' * 24}.sock"
    if len(os.fsencode(longest)) <= MAX_SOCKET_PATH_BYTES:
        return run
    digest = hashlib.sha256(os.fsencode(run)).hexdigest()[:12]
    return temp_dir / f"paceline-{os.getuid()}-{digest}"


def write_private(path: Path, content: str) -> None:
    """Write a file only its owner can read, whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(content)
    temporary.rename(path)
