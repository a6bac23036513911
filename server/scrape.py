"""MetricsPage: our own metrics, then the engines' own with an `engine` label.

An engine that is down or slow is left out; the page never waits longer than the timeout for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from server.fleet import Engine, Fleet
from wire.errors import EngineError

logger = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 1.0
_PREFIXES = ("vllm:", "paceline_kv_store_")
"""An engine also exports its process's and its HTTP server's metrics; those names are not its alone."""


class MetricsPage:
    """Builds the text of GET /metrics."""

    def __init__(self, registry: CollectorRegistry, fleet: Fleet) -> None:
        self._registry = registry
        self._fleet = fleet

    async def text(self) -> bytes:
        texts = await asyncio.gather(*(self._scrape(engine) for engine in self._fleet.engines))
        pages = {engine.id: text for engine, text in zip(self._fleet.engines, texts, strict=True)}
        own = generate_latest(self._registry)
        # Parsing thousands of lines would hold up the event loop, and with it every stream.
        return own + await asyncio.to_thread(_engine_pages, pages)

    async def _scrape(self, engine: Engine) -> str | None:
        try:
            return await engine.client.metrics_text(timeout_s=SCRAPE_TIMEOUT_S)
        except EngineError:
            return None


class _Collected:
    """Finished metric families, in the shape `generate_latest` reads."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _engine_pages(pages: dict[str, str | None]) -> bytes:
    """The engines' pages as one, families merged by name."""
    up = GaugeMetricFamily("paceline_engine_up", "1 where the engine's metrics could be read.", labels=["engine"])
    families: dict[str, Metric] = {}
    for engine_id, text in pages.items():
        is_up = text is not None
        try:
            for family in text_string_to_metric_families(text or ""):
                if family.name.startswith(_PREFIXES):
                    _merge(families, family, engine_id)
        except ValueError as error:
            logger.warning("engine %s: its metrics are not readable: %s", engine_id, error)
            is_up = False
        up.add_metric([engine_id], float(is_up))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected([up, *families.values()]))
    return generate_latest(registry)


def _merge(families: dict[str, Metric], family: Metric, engine_id: str) -> None:
    merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
    for sample in family.samples:
        labels = dict(sample.labels)
        if "engine" in labels:
            # vLLM's own label of that name numbers the engine cores of one server.
            labels["engine_index"] = labels.pop("engine")
        merged.samples.append(
            Sample(sample.name, labels | {"engine": engine_id}, sample.value, sample.timestamp, sample.exemplar)
        )
