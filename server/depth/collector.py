"""Metrics of depth control, read off the controllers at scrape time."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from server.depth.control import DepthControl

_BUCKET = ["engine", "bucket"]
_KIND = ["engine", "bucket", "depth"]


class DepthCollector:
    """K by engine and bucket, and what decode steps took."""

    def __init__(self, control: DepthControl) -> None:
        self._control = control

    def collect(self) -> Iterator[Metric]:
        depth = GaugeMetricFamily("paceline_depth", "K in force for batches of up to `bucket` requests.", labels=_BUCKET)
        changes = CounterMetricFamily("paceline_depth_changes", "Changes of the K of a bucket.", labels=["engine"])
        trials = CounterMetricFamily("paceline_depth_trials", "Short runs at another K.", labels=["engine"])
        lost = CounterMetricFamily("paceline_depth_lost_seconds", "Decode time that trials cost.", labels=["engine"])
        steps = CounterMetricFamily("paceline_decode_steps", "Timed decode steps.", labels=_KIND)
        step_s = CounterMetricFamily("paceline_decode_step_seconds", "Time of these steps.", labels=_KIND)
        for engine, controller in self._control.controllers().items():
            changes.add_metric([engine], controller.num_changes)
            trials.add_metric([engine], controller.num_trials)
            lost.add_metric([engine], controller.budget.lost_s)
            for bucket in controller.buckets.values():
                depth.add_metric([engine, str(bucket.limit)], bucket.depth)
                for each, num_steps in bucket.num_steps.items():
                    steps.add_metric([engine, str(bucket.limit), str(each)], num_steps)
                    step_s.add_metric([engine, str(bucket.limit), str(each)], bucket.total_s[each])
        yield from (depth, changes, trials, lost, steps, step_s)
