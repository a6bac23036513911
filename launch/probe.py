"""HTTP questions the launcher asks: is a role ready, and what does the admin API say. Standard library only."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from launch.rundir import LaunchError

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Loopback only: a proxy from the environment must not see these requests."""


def http_status(url: str, *, token: str | None = None, timeout_s: float = 2.0) -> int | None:
    """Status code of a GET; None where nobody answers."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except (OSError, ValueError):
        return None


def is_closed(url: str, *, timeout_s: float = 0.5) -> bool:
    """Whether nobody listens at a URL's address. A process that hangs still listens, one that is ending does not."""
    address = urllib.parse.urlsplit(url)
    try:
        with socket.create_connection((address.hostname or "", address.port or 80), timeout_s):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


class AdminClient:
    """The gateway's admin API, as an operator uses it."""

    def __init__(self, base_url: str, token: str) -> None:
        self._base_url = base_url.rstrip("/")
        self._token = token

    def get(self, path: str, *, timeout_s: float = 5.0) -> dict[str, Any]:
        return self._call("GET", path, None, timeout_s)

    def post(self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = 120.0) -> dict[str, Any]:
        return self._call("POST", path, body or {}, timeout_s)

    def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        request = urllib.request.Request(
            self._base_url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )
        try:
            with _OPENER.open(request, timeout=timeout_s) as response:
                content = json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            with error:
                raise LaunchError(f"{method} {path} was refused ({error.code}): {error_message(error.read())}") from None
        except (OSError, ValueError) as error:
            raise LaunchError(f"the admin API at {self._base_url} does not answer: {error}; is the system up?") from None
        return content if isinstance(content, dict) else {"data": content}


def error_message(payload: bytes) -> str:
    """The reason inside an OpenAI-shaped error body, else its beginning."""
    try:
        return str(json.loads(payload)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return payload[:300].decode(errors="replace") or "no reason given"
