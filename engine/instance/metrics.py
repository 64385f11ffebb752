"""The metrics of GET /metrics that both engines give, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

GAUGES = {
    "running": ("metronome_instance_running", "Responses being decoded."),
    "waiting": ("metronome_instance_waiting", "Requests that wait for a slot."),
    "weight_version": ("metronome_instance_weight_version", "Weight version served; 0 is the base model."),
}
COUNTERS = {
    "generated_tokens": ("metronome_instance_generated_tokens", "Tokens sampled since the start."),
    "prefills": ("metronome_instance_prefills", "Prompts computed from their first token since the start."),
    "updates": ("metronome_instance_weight_updates", "Weight updates finished since the start."),
}


class _Figures(Collector):
    """The figures of one scrape. The Counter class of prometheus_client would add its time of creation."""

    def __init__(self, figures: Mapping[str, int]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        for key, (name, text) in GAUGES.items():
            yield GaugeMetricFamily(name, text, self._figures[key])
        for key, (name, text) in COUNTERS.items():
            yield CounterMetricFamily(name, text, self._figures[key])


def exposition(figures: Mapping[str, int]) -> bytes:
    """Return the text for the figures of Backend.load and `updates`. The names of counters end in _total."""
    registry = CollectorRegistry()
    registry.register(_Figures(figures))
    return generate_latest(registry)
