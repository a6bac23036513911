"""The roles that are ours as processes: read the resolved configuration and hand over to the role's main."""

from __future__ import annotations

from pathlib import Path


def run_gateway(path: Path) -> int:
    """Run the gateway until it is told to stop; raises PacelineError."""
    from server.config import GatewayConfig
    from server.main import run

    return int(run(GatewayConfig.read_json(path)) or 0)


def run_learner(path: Path) -> int:
    """Run the learner until it is told to stop; raises PacelineError."""
    from learner.config import LearnerConfig
    from learner.main import run

    return int(run(LearnerConfig.read_json(path)) or 0)
