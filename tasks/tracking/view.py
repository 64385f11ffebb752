"""The view of an experiment in MLflow's UI: a table of runs with chosen columns, and charts that start with the figures
of a training.

The view is a tag of the experiment, in the form that MLflow's button "Share" stores. An address with its key opens it.
Users may change what they see; the tag stays.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable

import mlflow

from engine.types import JsonObject
from tasks.tracking.metric_names import metric_name

KEY = "metronome"
DEFLATED = "deflate;"
"""Prefix of a value that is compressed and in base64."""
VIEW = f"mlflow.sharedViewState.{KEY}"
"""Tag of an experiment with the view."""
KIND = "mlflow.experimentKind"
"""Tag of an experiment that selects which of its pages the UI opens."""
TRAINING = "custom_model_development"
"""The kind with a table of runs; the other has pages for prompts and traces."""
BENCHMARKS = "metronome.benchmarks"
"""Tag of an experiment: the benchmarks on which its runs were evaluated, separated by ", "."""

CHARTS = {
    "reward_mean": "Reward",
    "tokens_per_s_per_device": "Trained tokens/s/device",
    "wait_ratio": "Share of a step that the trainer waits",
    "response_length_mean": "Response length (tokens)",
    "entropy": "Entropy (nats per token)",
    "kl": "KL from the reference (nats per token)",
    "reward/episode/turns": "Turns per response",
    "reward/episode/environment_tokens": "Tokens of the environment per response",
    "reward/episode/program_s": "Time of the program per response (s)",
}
"""Metrics that are drawn after the accuracies, with their titles; the last three are those of programs."""
COLUMNS = ("train.mode", "train.steps", "train.learning_rate", "algorithm.advantage", "data.train")
"""Parameters in the table, after the figures."""


def update_view(client: mlflow.MlflowClient, experiment: str, benchmarks: Iterable[str]) -> None:
    """Update the view of an experiment. `benchmarks`: the benchmarks of a run to add to it.

    Raises mlflow.MlflowException if the update is refused twice. It may be refused once, because MLflow's store rejects
    one of two runs that write the same tag at the same moment.
    """
    try:
        _show(client, experiment, benchmarks)
    except mlflow.MlflowException:
        _show(client, experiment, benchmarks)


def _show(client: mlflow.MlflowClient, experiment: str, benchmarks: Iterable[str]) -> None:
    tags = client.get_experiment(experiment).tags
    known = filter(None, tags.get(BENCHMARKS, "").split(", "))
    names = list(dict.fromkeys([*known, *map(metric_name, benchmarks)]))
    wanted = {BENCHMARKS: ", ".join(names), VIEW: pack_state(view_state(names))}
    if KIND not in tags:  # otherwise a person has chosen it
        wanted[KIND] = TRAINING
    for name, value in wanted.items():
        if tags.get(name) != value:
            client.set_experiment_tag(experiment, name, value)


def pack_state(state: JsonObject) -> str:
    """The state as MLflow's page stores it, compressed because a tag has at most 5000 characters."""
    return DEFLATED + base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()


def view_state(benchmarks: Iterable[str]) -> JsonObject:
    """The state of MLflow's page (3.17), with the keys that MLflow's code uses."""
    accuracies = {f"{name}/avg_at_k": f"Avg@k on {name}" for name in benchmarks}
    first, *others = CHARTS.items()
    charts = dict([first, *accuracies.items(), *others])
    section = {"display": True, "isReordered": True, "deleted": False, "isGenerated": False}
    closed = [*(name.partition("/")[0] for name in accuracies), "Model metrics", "System metrics"]
    return {
        "searchFilter": "",
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "selectedColumns": [
            "attributes.`Models`",
            *(f"metrics.`{name}`" for name in list(charts)[: len(accuracies) + 3]),
            *(f"params.`{name}`" for name in COLUMNS),
        ],
        "compareRunCharts": [_chart(name, title) for name, title in charts.items()],
        "compareRunSections": [
            {"uuid": KEY, "name": "Training", **section, "columns": 2},
            *({"uuid": f"{KEY}-{name}", "name": name, **section, "display": False} for name in closed),
        ],
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
    }


def _chart(metric: str, title: str) -> JsonObject:
    return {
        "uuid": f"{KEY}-{metric}",
        "type": "LINE",
        "metricSectionId": KEY,
        "runsCountToCompare": 10,
        "deleted": False,
        "isGenerated": False,
        "displayName": title,
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "lineSmoothness": 0,
        "xAxisScaleType": "linear",
        "scaleType": "linear",
        "range": {},
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }
