"""Who a request belongs to: its id, tenant, domain, session and wish about capture, read from headers and validated.

This module owns the request headers that are ours. It does not know bodies or engines.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from server.errors import ApiError

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LABEL = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_CAPTURE = {"on": True, "off": False}

DEFAULT_LABEL = "default"


@dataclass(frozen=True, slots=True)
class Identity:
    """What travels with a request to the engine and back."""

    request_id: str
    tenant: str
    domain: str
    capture: bool
    session: str | None = None
    """The client's name for its conversation; its requests are best answered where the earlier ones were."""

    def engine_args(self) -> dict[str, str | int]:
        """What the engine's worker reads from `vllm_xargs`."""
        return {"paceline_capture": int(self.capture), "paceline_tenant": self.tenant, "paceline_domain": self.domain}


def read_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's `X-Request-Id` where it is usable, else a new one: an odd id is no reason to refuse work."""
    given = _header(headers, b"x-request-id")
    return given if given is not None and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def read_identity(headers: list[tuple[bytes, bytes]], request_id: str) -> Identity:
    """Raises ApiError (400) naming the header that is not usable."""
    return Identity(
        request_id=request_id,
        tenant=_label(headers, "X-Paceline-Tenant"),
        domain=_label(headers, "X-Paceline-Domain"),
        capture=_capture(headers),
        session=_optional_label(headers, "X-Session-Id"),
    )


def _label(headers: Iterable[tuple[bytes, bytes]], name: str) -> str:
    value = _optional_label(headers, name)
    return DEFAULT_LABEL if value is None else value


def _optional_label(headers: Iterable[tuple[bytes, bytes]], name: str) -> str | None:
    value = _header(headers, name.lower().encode())
    if value is not None and not _LABEL.fullmatch(value):
        raise ApiError(400, f"{name} must be 1 to 64 of A-Z a-z 0-9 . _ : -, got {value[:80]!r}", code="bad_header", param=name)
    return value


def _capture(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    name = "X-Paceline-Capture"
    value = _header(headers, name.lower().encode())
    if value is None:
        return True
    wish = _CAPTURE.get(value.lower())
    if wish is None:
        raise ApiError(400, f"{name} must be on or off, got {value[:80]!r}", code="bad_header", param=name)
    return wish


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    for key, value in headers:
        if key == name:
            return value.decode("latin-1").strip()
    return None
