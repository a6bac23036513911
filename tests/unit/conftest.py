"""Unit tests start no engine and load none: vLLM alone takes 19 s to import."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

UNIT = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def _vllm_is_not_imported(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if all(item.path.is_relative_to(UNIT) for item in request.session.items):  # others may import it
        assert "vllm" not in sys.modules, "a unit test imports vLLM; it belongs to tests/engine"
