"""Evaluate: the accuracy of a model folder on the benchmarks, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from engine.config import Config
from engine.errors import DeadlineError, ProcessDied
from engine.evaluation.results import done_before
from engine.orchestrator import standalone_evaluation as evaluation
from engine.orchestrator.run_events import RunEvents
from engine.run.files import read_json, seal, write_json
from engine.run.folder import RunFolder
from engine.run.served_model import in_use
from engine.types import JsonObject
from tasks.attempt import run_folder
from tasks.cluster.devices import count_devices, hold_devices
from tasks.cluster.other_nodes import evaluation_nodes
from tasks.terminal.console import say
from tasks.terminal.progress_display import show_progress
from tasks.tracking import evaluation_texts
from tasks.tracking.artifact_cells import table_rows
from tasks.tracking.mirror import SAME_AT_ONE


def _worth_retrying(task: Any, run: Any, state: Any) -> bool:  # noqa: ANN401
    """Whether to retry the evaluation: yes after a dead process or a missed deadline, no after wrong input."""
    return isinstance(state.result(raise_on_failure=False), ProcessDied | DeadlineError)


def evaluate_shown(
    config: Config, model: Path, weight_version: int, folder: RunFolder, meeting: Path | None = None
) -> list[JsonObject]:
    """Evaluate a model folder for a task or a command, and show the progress on the console. Arguments, result and
    errors are those of `engine.orchestrator.standalone_evaluation.evaluate_model`."""
    instances = config.rollout.instances if meeting is not None else max(1, config.rollout.instances)
    progress = evaluation.EvaluationProgress(instances, notices=RunEvents(say, trained=False))
    with in_use(model), show_progress("evaluate", progress.progress):
        return evaluation.evaluate_model(
            config=config,
            model=model,
            weight_version=weight_version,
            folder=folder,
            meeting=meeting,
            progress=progress,
        )


@task(name="evaluate", cache_policy=NO_CACHE, retries=1, retry_condition_fn=_worth_retrying)
def evaluate(config: Config, model: Path, weight_version: int, pool_instances: int = 0) -> Mapping[str, Any]:
    """Evaluate a model folder; returns the new row of evaluations.jsonl. With several benchmarks, return the row of the
    first and print the others.

    `pool_instances`: instances on the rollout pool, in addition to rollout.instances. This does not use MLflow;
    `tasks.tracking.evaluations` logs evaluations.jsonl afterwards.
    """
    folder = run_folder(config)
    meeting = folder.path / "evaluations" / f"instances-{flow_run.id}-{weight_version}"
    with evaluation_nodes(config, model, pool_instances, meeting) as (there, place):
        rows = evaluate_shown(config=there, model=model, weight_version=weight_version, folder=folder, meeting=place)
    for row in rows[1:]:
        say("evaluate", evaluation_texts.describe_evaluation(row))
    for row in rows:
        description = f"{row['benchmark']}, weight version {weight_version}"
        create_table_artifact(table_rows(figures_shown(row)), key="evaluation", description=description)
    return rows[0]


def evaluate_once(config: Config, model: Path, weight_version: int, pool_instances: int = 0) -> Mapping[str, Any]:
    """`evaluate` for a flow run that may be restarted, for example because MLflow did not answer.

    An evaluation is not repeated if an earlier attempt has completed it, or if the run itself has: a pipeline evaluates
    its policy before an automation starts this flow. The evaluation holds the devices that it needs.
    """
    file = RunFolder(config.folder).path / "evaluations" / f"flow-run-{flow_run.root_flow_run_id}.json"
    if file.exists():
        say("evaluate", "done by an earlier attempt")
        what = "the evaluation of an earlier attempt"
        return dict(read_json(file, what, "delete it to evaluate again", sealed=True))
    known = done_before(config, model, weight_version, RunFolder(config.folder))
    if known is not None:
        say(
            "evaluate",
            f"run {config.run.name} already has this evaluation of its version {weight_version}, so nothing is "
            "sampled; another run.seed or protocol samples again",
        )
        return known[0]
    with hold_devices(*count_devices(config, pool_instances, training=False)):
        row = evaluate(config, model, weight_version, pool_instances)
    write_json(file, seal(row))
    return row


def figures_shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a row, accuracy first, followed by its protocol; none of them twice: `step` equals the weight
    version, and at one response per problem pass@k and maj@k equal avg@k."""
    lead = evaluation_texts.accuracy_with_interval(row)
    shown = {"protocol", "step", "avg_at_k", "ci_low", "ci_high"}
    repeated = set(SAME_AT_ONE) if row["samples"] == 1 else set()
    return lead | {name: value for name, value in row.items() if name not in shown | repeated} | dict(row["protocol"])
