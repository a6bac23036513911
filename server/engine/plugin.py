"""Entry point of `vllm.general_plugins`: runs in the API server, the engine core and every worker; idempotent.

vLLM logs and skips a plugin that raises. The worker class checks the pin again and fails the start, so a wrong release
never serves.
"""

from __future__ import annotations

from server.engine import depth
from server.engine.pin import require_pinned_vllm

WEIGHT_BACKEND = "paceline"


def register() -> None:
    """Register the weight-transfer engine and the depth utility; on a CPU, mend what the engine's core needs, too."""
    require_pinned_vllm()
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    # The factory has no public query; registering a known name twice raises.
    if WEIGHT_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(WEIGHT_BACKEND, "server.engine.weights", "PacelineWeightEngine")
    depth.install()
    if current_platform.is_cpu():
        from server.engine import mends

        mends.mend_waiting_without_a_core()
