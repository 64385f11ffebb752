"""Links a flow run and its MLflow run: tags in MLflow, a link artifact in Prefect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import mlflow
from prefect.artifacts import create_link_artifact
from prefect.runtime import flow_run

from engine.config import Config
from tasks.tracking import tracked_run
from tasks.tracking.mlflow_run import write_queue
from tasks.tracking.pages import ui
from tasks.tracking.retry import retry_while_away


@contextmanager
def tracked_flow(config: Config, evaluation: bool = False) -> Iterator[str]:
    """`tasks.tracking.tracked_run.tracked` inside a flow run, with links in both directions. Yields the MLflow run's
    id.

    An evaluation has tags of its own, so that the tags of the training's flow run stay.
    """
    with tracked_run.tracked(config, evaluation) as run_id:
        _tag(run_id, "prefect.evaluation_flow_run" if evaluation else "prefect.flow_run")
        _link(config, run_id)
        yield run_id


def run_url(config: Config, run_id: str) -> str:
    """The run's page in the MLflow UI."""
    experiment = retry_while_away(
        "the link to MLflow", lambda: mlflow.get_experiment_by_name(config.tracking.experiment)
    )
    assert experiment is not None, "tracked() makes it"
    return f"{ui(config)}/#/experiments/{experiment.experiment_id}/runs/{run_id}"


def _tag(run_id: str, prefix: str) -> None:
    client = mlflow.MlflowClient()
    for name, value in ((f"{prefix}_id", flow_run.id), (f"{prefix}_url", flow_run.ui_url)):
        if value:
            write_queue().do(f"the tag {name}", partial(client.set_tag, run_id, name, str(value)))


def _link(config: Config, run_id: str) -> None:
    description = "The run in MLflow."
    if not tracked_run.tracking_uri(config).startswith("http"):
        description += f" Its store has no server; start one with:\n\n    {tracked_run.ui_command(config)}"
    create_link_artifact(
        run_url(config, run_id), link_text=f"{config.run.name} in MLflow", key="mlflow", description=description
    )
