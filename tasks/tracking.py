"""MLflow: one run per run folder, straight to sqlite unless a tracking URI is given; no server, no telemetry."""

from __future__ import annotations

import logging
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow

from engine.config import Config
from engine.errors import BadInput
from engine.run_folder import write_atomically

RUN_ID = "mlflow_run_id"
"""File in the run folder with the id of its MLflow run, so that a resumed run goes on in the same one."""

logging.getLogger("mlflow").setLevel(logging.WARNING)
logging.getLogger("alembic").setLevel(logging.WARNING)


def tracking_uri(config: Config) -> str:
    """`tracking.uri`, or the sqlite store in `run.output`."""
    return config.tracking.uri or f"sqlite:///{Path(config.run.output).resolve() / 'mlflow.db'}"


def ui_command(config: Config) -> str:
    """The shell command that opens the MLflow UI on this run's store, with the mlflow of this environment."""
    mlflow_command = Path(sys.executable).with_name("mlflow")
    if mlflow_command.is_relative_to(Path.cwd()):
        mlflow_command = mlflow_command.relative_to(Path.cwd())
    return shlex.join([str(mlflow_command), "ui", "--backend-store-uri", tracking_uri(config)])


@contextmanager
def tracked(config: Config) -> Iterator[str]:
    """Track the body in the run folder's MLflow run (made if there is none yet); yields its id.

    Raises BadInput for a store that MLflow refuses. A body that raises leaves the run marked as failed. MLflow writes
    what is queued when the run ends.
    """
    config.folder.mkdir(parents=True, exist_ok=True)
    try:
        mlflow.set_tracking_uri(tracking_uri(config))
        mlflow.set_experiment(experiment_id=_experiment(config))
    except mlflow.MlflowException as error:
        raise BadInput(f"tracking.uri = {tracking_uri(config)!r}, experiment {config.tracking.experiment!r}: "
                       f"MLflow can't use it: {str(error).splitlines()[0]}") from None
    id_file = config.folder / RUN_ID
    known = id_file.read_text().strip() if id_file.exists() else None
    with mlflow.start_run(run_id=known, run_name=None if known else config.run.name) as run:
        if known is None:
            write_atomically(id_file, run.info.run_id)
            mlflow.log_params(flatten(config.model_dump(mode="json")))
            mlflow.set_tags({"metronome.run_folder": str(config.folder.resolve()), "metronome.mode": config.train.mode})
        yield run.info.run_id


def log_step(row: Mapping[str, Any]) -> None:
    """Every number of a line of steps.jsonl, at its step; lists are left out."""
    mlflow.log_metrics(numbers(row), step=row["step"], synchronous=False)


def log_evaluation(row: Mapping[str, Any]) -> None:
    """The figures of a line of evaluations.jsonl as `benchmark/avg_at_k` and so on."""
    benchmark = re.sub(r"[^\w.\- ]", "_", row["benchmark"])  # the characters MLflow takes
    figures = {f"{benchmark}/{name}": value for name, value in numbers(row).items()}
    mlflow.log_metrics(figures, step=row["step"])


def register(name: str, policy: Path) -> str:
    """Store a Hugging Face folder with the active run and register it as a new version of model `name`; its version."""
    run = mlflow.active_run()
    assert run is not None
    mlflow.log_artifacts(str(policy), "policy")
    client = mlflow.MlflowClient()
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name, description="Policies post-trained by Metronome")
    return str(client.create_model_version(name, mlflow.get_artifact_uri("policy"), run.info.run_id).version)


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The entries of a row that are numbers, but `step`."""
    return {
        name: float(value)
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """{"run": {"seed": 0}} → {"run.seed": 0}."""
    return {f"{table}.{key}": value for table, values in tree.items() for key, value in values.items()}


def _experiment(config: Config) -> str:
    """Id of the experiment; ours keeps its artifacts beside the sqlite store, not in the current folder."""
    found = mlflow.get_experiment_by_name(config.tracking.experiment)
    if found is not None:
        return str(found.experiment_id)
    artifacts = None if config.tracking.uri else (Path(config.run.output).resolve() / "mlartifacts").as_uri()
    return str(mlflow.create_experiment(config.tracking.experiment, artifact_location=artifacts))
