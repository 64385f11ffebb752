"""Links a flow run and its MLflow run, by tags in MLflow and a link artifact in Prefect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlflow
from prefect.artifacts import create_link_artifact
from prefect.runtime import flow_run

from engine.config import Config
from tasks.tracking import tracked_run
from tasks.tracking.evaluations import log_finished
from tasks.tracking.store import retry_while_away


@contextmanager
def tracked_flow(config: Config) -> Iterator[str]:
    """`tasks.tracking.tracked_run.track_run` inside a flow run, with links in both directions. Yields the MLflow run's
    id."""
    with tracked_run.track_run(config, _tags("prefect.flow_run")) as run_id:
        _link(config, run_id)
        yield run_id


def log_flow_evaluation(config: Config) -> None:
    """`tasks.tracking.evaluations.log_finished` inside a flow run, with links. The tags of the training's flow run are
    kept."""
    _link(config, log_finished(config, _tags("prefect.evaluation_flow_run")))


def run_url(config: Config, run_id: str) -> str:
    """The run's page in the MLflow UI."""
    experiment = retry_while_away(
        "the link to MLflow", lambda: mlflow.get_experiment_by_name(config.tracking.experiment)
    )
    assert experiment is not None, "tracked() makes it"
    return f"{tracked_run.ui_address(config)}/#/experiments/{experiment.experiment_id}/runs/{run_id}"


def _tags(prefix: str) -> dict[str, str]:
    found = {f"{prefix}_id": flow_run.id, f"{prefix}_url": flow_run.ui_url}
    return {name: str(value) for name, value in found.items() if value}


def _link(config: Config, run_id: str) -> None:
    description = "The run in MLflow."
    if not tracked_run.has_server(config):
        description += f" Its store has no server; start one with:\n\n    {tracked_run.ui_command(config)}"
    create_link_artifact(
        run_url(config, run_id), link_text=f"{config.run.name} in MLflow", key="mlflow", description=description
    )
