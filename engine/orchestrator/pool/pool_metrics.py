"""GET /metrics of the orchestrator: pool, instances and the trainer's last step in the Prometheus text format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Gauge, generate_latest

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


def metrics_text(instances: Sequence[Mapping[str, Any]], step: Mapping[str, Any]) -> bytes:
    """Return the metrics text. `instances`: as from Instance.status. `step`: the last step's report, empty before the
    first."""
    registry = CollectorRegistry()

    def gauge(name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"metronome_{name}", text, labels, registry=registry)

    size = sum(one["state"] in WORKING for one in instances)
    gauge("pool_size", "Instances that take prompts, or are being given weights.").set(size)
    for key, text in FIGURES.items():
        figure = gauge(f"pool_instance_{key}", text, "instance")
        for one in instances:
            if one[key] is not None:
                figure.labels(one["name"]).set(one[key])
    states = gauge("pool_instance_state", "1 for the state it is in.", "instance", "state")
    for one in instances:
        for state in get_args(State):
            states.labels(one["name"], state).set(one["state"] == state)
    for key, value in step.items():
        if isinstance(value, (int, float)):
            gauge(f"step_{key}", f"{key} of the last finished step (steps.jsonl).").set(value)
    return generate_latest(registry)
