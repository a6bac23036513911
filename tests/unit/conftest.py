"""Unit tests start no engine and load none: vLLM alone takes 19 s to import."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _vllm_is_not_imported() -> Iterator[None]:
    yield
    assert "vllm" not in sys.modules, "a unit test imports vLLM; it belongs to tests/engine"
