"""Names of environment variables that several processes read, and the one directory they lead to."""

from __future__ import annotations

import os
from pathlib import Path

OPERATOR_TOKEN_VARIABLE = "PACELINE_OPERATOR_TOKEN"
"""Holds the secret that opens the admin API."""
ENGINE_TOKEN_VARIABLE = "PACELINE_ENGINE_TOKEN"
"""Holds the secret that opens an engine's private control routes."""


def paceline_home() -> Path:
    """Where models, state and environments of other programs live: $PACELINE_HOME, else ~/.cache/paceline."""
    return Path(os.environ.get("PACELINE_HOME") or Path.home() / ".cache" / "paceline")
