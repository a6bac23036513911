"""The roles that are ours as processes: read the resolved configuration and hand over to the role's main."""

from __future__ import annotations

import logging
from pathlib import Path

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run_gateway(path: Path) -> int:
    """Run the gateway until it is told to stop; raises PacelineError."""
    from server.config import GatewayConfig
    from server.main import main

    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT)
    return int(main(GatewayConfig.read_json(path)) or 0)


def run_learner(path: Path) -> int:
    """Run the learner until it is told to stop; raises PacelineError."""
    from learner.config import LearnerConfig
    from learner.main import main

    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT)
    return int(main(LearnerConfig.read_json(path)) or 0)
