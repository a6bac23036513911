"""Unit tests start no engine and load none: vLLM alone takes 19 s to import.

Those that start processes or wait for real time, with whole gateways, learners, supervisors and runs of the load tester, are
marked `rig`: they take most of the time, so that the rest can be run at every save (`make unit`; `make rigs` runs them).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import ABSENT

UNIT = Path(__file__).parent
RIGS = (
    "launch/test_pretrain.py",
    "launch/test_supervise.py",
    "learner/test_learning_session.py",
    "learner/test_publisher.py",
    "loadtest/test_fault_bars.py",
    "loadtest/test_gateway_bars.py",
    "loadtest/test_load_run.py",
    "loadtest/test_mock_engine.py",
    "loadtest/test_run_actions.py",
    "rl/test_code_environment.py",
    "rl/test_environment_pool.py",
    "rl/test_generator.py",
    "rl/test_generator_faults.py",
    "rl/test_math_environment.py",
    "rl/test_rl_run.py",
    "rl/test_rl_run_reward_model.py",
    "rl/test_sandbox.py",
    "rl/test_target_updates.py",
    "server/depth/test_depth_gateway.py",
    "server/routing/test_routing_gateway.py",
    "server/routing/test_routing_kv_events.py",
    "server/test_*.py",
    "test_light_imports.py",
    "test_without_a_browser.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(UNIT) and any(item.path.relative_to(UNIT).match(pattern) for pattern in RIGS):
            item.add_marker("rig")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A run that looked at no page in a browser says so in its last lines, not only among its skips."""
    num_skipped = sum(ABSENT in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
    if num_skipped:
        terminalreporter.write_line(f"Pages were not looked at, {num_skipped} tests: {ABSENT}", yellow=True)


@pytest.fixture(scope="session", autouse=True)
def _vllm_is_not_imported(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if all(item.path.is_relative_to(UNIT) for item in request.session.items):  # others may import it
        assert "vllm" not in sys.modules, "a unit test imports vLLM; it belongs to tests/engine"
