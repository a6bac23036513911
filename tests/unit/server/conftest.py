"""The gateway's tests share a fake engine and a rig; both lie beside this file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _prompts_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not decide what a test sees; what the bound is for has tests that set it."""
    from server.routing import tokens

    monkeypatch.setattr(tokens, "MAX_WAIT_S", 60.0)
