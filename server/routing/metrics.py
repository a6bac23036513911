"""What routing counts itself, as it happens. Names begin with `paceline_`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class RoutingMetrics:
    """Counters of the router and of the KV events it rests on."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.routed = Counter(
            "paceline_routed", "Requests routed, by path and why it was taken.", ["path", "reason"], registry=registry
        )
        self.predictions = Counter(
            "paceline_kv_predictions",
            "Predicted against reported cached prompt tokens: `correct` within one block, else `over` or `under`.",
            ["outcome"],
            registry=registry,
        )
        self.predicted_tokens = Counter(
            "paceline_kv_predicted_tokens", "Cached prompt tokens the index predicted.", registry=registry
        )
        self.reported_tokens = Counter(
            "paceline_kv_reported_tokens", "Cached prompt tokens the engines reported.", registry=registry
        )
        self.events = Counter(
            "paceline_kv_events",
            "KV events by kind: `stored`, `removed`, `cleared`; `orphan` (its parent is not known), `elsewhere` (not in "
            "the engine's own memory), `partial` (not of whole attention) and `unknown` are left out of the index.",
            ["engine", "kind"],
            registry=registry,
        )
        self.gaps = Counter(
            "paceline_kv_event_gaps", "Times numbers were missing among KV events.", ["engine"], registry=registry
        )
        self.replays = Counter(
            "paceline_kv_replays",
            "Replays asked of engines: `complete`, `incomplete` or `unanswered`.",
            ["engine", "outcome"],
            registry=registry,
        )
        self.dropped_indexes = Counter(
            "paceline_kv_dropped_indexes",
            "Times all that was known of an engine's KV was forgotten: events were lost, or its target has changed.",
            ["engine"],
            registry=registry,
        )
        self.bad_events = Counter(
            "paceline_bad_kv_events", "KV event messages that could not be used.", ["engine"], registry=registry
        )

    def num_routed(self) -> dict[tuple[str, str], int]:
        """Requests routed so far, by path and reason."""
        samples = [sample for family in self.routed.collect() for sample in family.samples if sample.name.endswith("_total")]
        return {(sample.labels["path"], sample.labels["reason"]): int(sample.value) for sample in samples}
