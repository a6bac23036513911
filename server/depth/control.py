"""DepthControl: one controller per engine, fed by the engine's counters; what it decides is set on the engine.

With `mode = "fixed"` the controllers only watch, and nothing is ever set.
"""

from __future__ import annotations

import asyncio
import logging

from server.config import DepthSettings
from server.depth.controller import DepthController
from server.depth.explain import engine_depth
from server.depth.readings import Readings
from server.fleet import Engine, Fleet
from wire.depth import DepthView
from wire.errors import EngineError
from wire.messages import EngineStats
from wire.spec import SCHEMA_VERSION

logger = logging.getLogger(__name__)


class _Keeper:
    """Depth of one engine."""

    def __init__(self) -> None:
        self.readings = Readings()
        self.controller: DepthController | None = None
        """None until the engine has said which table it has."""
        self.wake = asyncio.Event()
        """Set where the engine has another table than the controller's."""


class DepthControl:
    """Made inside a running event loop."""

    def __init__(self, fleet: Fleet, settings: DepthSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._keepers = {engine.id: _Keeper() for engine in fleet.engines}

    def ingest(self, engine: Engine, stats: EngineStats, *, now_s: float) -> None:
        """Take in an engine's counters. `now_s` is Unix time."""
        keeper = self._keepers[engine.id]
        reading = keeper.readings.take(stats)
        status = engine.status
        if status is None or not status.depths or status.engine_epoch != stats.engine_epoch:
            return
        controller = keeper.controller
        if controller is None or not self._fits(controller, status.depths, status.num_speculative_tokens):
            controller = keeper.controller = DepthController(status.depths, status.num_speculative_tokens)
        if not self._is_auto:
            controller.observe(reading, now_s)
            return
        controller.update(reading, now_s)
        if controller.table() != status.depths:
            keeper.wake.set()

    async def apply(self, engine: Engine) -> None:
        """Set what is decided for one engine, for as long as the gateway runs; after its restart too."""
        keeper = self._keepers[engine.id]
        while True:
            await keeper.wake.wait()
            keeper.wake.clear()
            if keeper.controller is None or not engine.ready:
                continue  # its next counters bring it here again
            epoch = engine.epoch
            try:
                depths = await engine.client.set_depth(keeper.controller.table())
            except EngineError as error:
                logger.warning("engine %s did not take its depths: %s", engine.id, error)
                continue
            if engine.epoch == epoch:
                engine.note_depths(depths)

    def forget_acceptance(self) -> None:
        """What was accepted under another target tells nothing of the one that serves now."""
        for controller in self.controllers().values():
            controller.forget_acceptance()

    def controllers(self) -> dict[str, DepthController]:
        """By engine id, of those that have told their table."""
        return {name: keeper.controller for name, keeper in self._keepers.items() if keeper.controller is not None}

    def view(self) -> DepthView:
        found = [(engine, self._keepers[engine.id].controller) for engine in self._fleet.engines]
        return DepthView(
            schema_version=SCHEMA_VERSION,
            mode=self._settings.mode,
            engines=[
                engine_depth(engine.id, controller, is_applied=_has(engine, controller))
                for engine, controller in found
                if controller is not None
            ],
        )

    @property
    def _is_auto(self) -> bool:
        return self._settings.mode == "auto"

    def _fits(self, controller: DepthController, depths: list[int], max_depth: int) -> bool:
        """Whether it is a controller of such an engine; one that only watches follows the engine's table."""
        is_like = (controller.max_requests, controller.max_depth) == (len(depths), max_depth)
        return is_like and (self._is_auto or controller.table() == depths)


def _has(engine: Engine, controller: DepthController) -> bool:
    return engine.status is not None and engine.status.depths == controller.table()
