"""GET /metrics of the orchestrator: pool, instances and the trainer's last step in the Prometheus text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.orchestrator.pool.instance import WORKING, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIGURES = {
    "running": "Responses being decoded.",
    "waiting": "Requests that wait for a slot.",
    "tokens_per_s": "Tokens generated per second between the last two heartbeats.",
    "version": "Weight version it was last given.",
    "restarts": "Restarts of its process.",
    "failures": "Failures in a row; three leave it out.",
    "groups": "Groups in flight.",
    "group_s": "Seconds per group at its pace, smoothed.",
}
"""Help texts of an instance's metrics, by the key of its status."""


class _Scrape(Collector):
    def __init__(self, instances: Sequence[Mapping[str, Any]], step: Mapping[str, Any]) -> None:
        self._instances = instances
        self._step = step

    def collect(self) -> Iterator[Metric]:
        size = sum(one["state"] in WORKING for one in self._instances)
        yield GaugeMetricFamily("metronome_pool_size", "Instances that take prompts, or are being given weights.", size)
        for key, text in FIGURES.items():
            yield self._of_instances(key, text)
        yield self._states()
        for key, value in self._step.items():
            if isinstance(value, (int, float)):
                yield GaugeMetricFamily(
                    f"metronome_step_{key}", f"{key} of the last finished step (steps.jsonl).", value
                )

    def _of_instances(self, key: str, text: str) -> Metric:
        family = GaugeMetricFamily(f"metronome_pool_instance_{key}", text, labels=["instance"])
        for one in self._instances:
            if one[key] is not None:
                family.add_metric([one["name"]], one[key])
        return family

    def _states(self) -> Metric:
        text = "1 for the state it is in."
        family = GaugeMetricFamily("metronome_pool_instance_state", text, labels=["instance", "state"])
        for one in self._instances:
            for state in get_args(State):
                family.add_metric([one["name"], state], float(one["state"] == state))
        return family


def metrics_text(instances: Sequence[Mapping[str, Any]], step: Mapping[str, Any]) -> bytes:
    """Return the metrics text. `instances`: as from Instance.status. `step`: the last step's report, empty before the
    first."""
    registry = CollectorRegistry()
    registry.register(_Scrape(instances, step))
    return generate_latest(registry)
