"""What is under load: a URL, a model, and where it is ours an admin API and the processes of this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from wire.environment import OPERATOR_TOKEN_VARIABLE
from wire.errors import PacelineError

API_KEY_VARIABLE = "OPENAI_API_KEY"
_MODELS_TIMEOUT_S = 30.0


class TargetError(PacelineError):
    """There is nothing to send requests to, or it cannot do what the scenario asks."""

    code = "bad_target"


@dataclass(frozen=True, repr=False)
class Admin:
    """The admin API of a gateway."""

    session: aiohttp.ClientSession
    url: str
    token: str

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The decoded answer; raises TargetError where it is refused or does not come."""
        headers = {"Authorization": f"Bearer {self.token}"}
        try:
            async with self.session.request(method, self.url + path, json=body, headers=headers) as response:
                answer = await response.read()
            content = msgspec.json.decode(answer) if answer.strip() else None
        except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
            raise TargetError(f"{method} {path}: no answer ({type(error).__name__}: {error})") from error
        if response.status >= 300:
            problem = content.get("error") if isinstance(content, dict) else content
            reason = problem.get("message", problem) if isinstance(problem, dict) else problem
            raise TargetError(f"{method} {path}: {response.status} {reason}")
        return content


@dataclass(frozen=True)
class Target:
    """Where requests go."""

    url: str
    """Without `/v1`."""
    model: str
    headers: dict[str, str] = field(default_factory=dict)
    admin: Admin | None = None
    system_file: Path | None = None
    """`system.json` of the local system, which names its processes."""

    def process_ids(self) -> dict[str, int]:
        """Of the local system's running processes, by name; nothing where it is not on this machine or not up."""
        if self.system_file is None:
            return {}
        processes = _read(self.system_file).get("processes", {})
        return {name: int(process["pid"]) for name, process in processes.items() if process.get("pid")}


async def find(
    session: aiohttp.ClientSession, *, url: str | None, admin_url: str | None, model: str | None, state_dir: Path
) -> Target:
    """The system at `url`, or the one that runs from `state_dir`; raises TargetError.

    The local system's admin API and processes are used where `url` is its URL. Elsewhere the admin API needs `admin_url` and
    the operator's token in the environment.
    """
    local = _read(state_dir / "run" / "system.json")
    url = _without_path(url or str(local.get("gateway_url", "")))
    if not url:
        raise TargetError(f"no system runs from {state_dir}; start one with `paceline up`, or give --url")
    if not url.startswith(("http://", "https://")):
        raise TargetError(f"{url} is no URL of a server; it begins with http:// or https://")
    is_local = url == local.get("gateway_url")
    token = os.environ.get(OPERATOR_TOKEN_VARIABLE) or (_token(state_dir) if is_local else None)
    admin_url = admin_url or (str(local["admin_url"]) if is_local else None)
    key = os.environ.get(API_KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return Target(
        url=url,
        model=model or await _first_model(session, url, headers),
        headers=headers,
        admin=Admin(session, admin_url.rstrip("/"), token) if admin_url and token else None,
        system_file=state_dir / "run" / "system.json" if is_local else None,
    )


async def _first_model(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> str:
    try:
        timeout = aiohttp.ClientTimeout(total=_MODELS_TIMEOUT_S)
        async with session.get(f"{url}/v1/models", headers=headers, allow_redirects=False, timeout=timeout) as response:
            if "Location" in response.headers:
                raise ValueError(f"it redirects to {response.headers['Location']}")
            content = msgspec.json.decode(await response.read())
        return str(content["data"][0]["id"])
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise TargetError(f"{url}/v1/models names no model ({type(error).__name__}: {error}); is --url right?") from error


def _without_path(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _token(state_dir: Path) -> str | None:
    try:
        return (state_dir / "run" / "operator.token").read_text().strip()
    except OSError:
        return None
