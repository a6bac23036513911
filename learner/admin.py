"""AdminClient: the learner's two calls to the gateway's admin port. It never raises for an absent gateway."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass

import msgspec

from wire.control import ActivateRequest, LearnerOrders, LearnerReport
from wire.environment import OPERATOR_TOKEN_VARIABLE

_REPORT_TIMEOUT_S = 5.0
_ACTIVATE_TIMEOUT_S = 120.0
"""Longer than the gateway gives a swap: its answer says what serves."""
_NETWORK_ERRORS = (urllib.error.URLError, OSError, ValueError, http.client.HTTPException)
"""HTTPException: an answer that breaks off, or is none of HTTP; it is no OSError."""


@dataclass(frozen=True)
class Answer:
    """Of an activation. `code` is `ok`, `unreachable`, or the gateway's error code; `reason` is for people."""

    code: str
    reason: str

    @property
    def is_ok(self) -> bool:
        return self.code == "ok"


class AdminClient:
    """`base_url` is that of the admin port; the operator's token comes from the environment."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url.rstrip("/")

    def activate(self, version: int, request: ActivateRequest, idempotency_key: str) -> Answer:
        """Ask for a version to be served. The same key asks the same thing, however often it is sent."""
        path = f"/admin/drafts/{version}/activate"
        headers = {"Idempotency-Key": idempotency_key}
        try:
            self._post(path, msgspec.json.encode(request), _ACTIVATE_TIMEOUT_S, headers)
        except urllib.error.HTTPError as error:
            return _refusal(error)
        except _NETWORK_ERRORS as error:
            return Answer("unreachable", str(error))
        return Answer("ok", "")

    def report(self, report: LearnerReport) -> LearnerOrders | None:
        """Deliver a report; None where the gateway does not answer or not sensibly."""
        try:
            body = self._post("/admin/learner/report", msgspec.json.encode(report), _REPORT_TIMEOUT_S, {})
            return msgspec.json.decode(body, type=LearnerOrders)
        except (*_NETWORK_ERRORS, msgspec.DecodeError):
            return None

    def _post(self, path: str, body: bytes, timeout_s: float, headers: dict[str, str]) -> bytes:
        request = urllib.request.Request(self._base_url + path, data=body, method="POST")
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", f"Bearer {os.environ.get(OPERATOR_TOKEN_VARIABLE, '')}")
        for name, value in headers.items():
            request.add_header(name, value)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer: bytes = response.read()
        return answer


def _refusal(error: urllib.error.HTTPError) -> Answer:
    try:
        parsed = json.loads(error.read())
        details = parsed["error"]
        return Answer(str(details.get("code") or error.code), str(details.get("message") or error.reason))
    except (*_NETWORK_ERRORS, KeyError, TypeError, AttributeError):
        return Answer(str(error.code), str(error.reason))
