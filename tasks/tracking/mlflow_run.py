"""One run in MLflow: its write queue, parameters, files and final status."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import LoggedModelInput, Param, RunTag

from engine.config import Config
from engine.config.keys import flatten
from engine.errors import BadInput, MetronomeError, TakenOver
from engine.model.shape import content_hash
from engine.run.folder import RunFolder
from engine.run.identity import identity
from tasks.console import complain
from tasks.tracking.metric_names import metric_name
from tasks.tracking.retry import retry_while_away
from tasks.tracking.write_queue import FLUSH_S, STORE_ERRORS, MachineLoad, WriteQueue, first_line

PARAMETER_LIMIT = 6000
"""The largest number of characters in a parameter's value that MLflow accepts."""
PARAMETERS_AT_ONCE = 100
"""The largest number of parameters in one request that MLflow accepts."""
SAMPLES = 20
"""MLflow gets the response samples of about this many steps; the run folder has those of every step."""
HURRY_S = 4.0
"""Seconds that a failed or cancelled run waits for the tracking server at its end."""
FILES = ("config.toml", "start.json", "data.json", "steps.jsonl", "evaluations.jsonl", "timeline.html", "failure.json")
"""Files of the run folder that become artifacts at the end."""

NUMBER = "metronome.run_id"
"""Tag with the run's number (engine.run.identity). The checkpoints have the number, too, so it survives the loss of the
run folder."""

_current: list[tuple[WriteQueue, Config]] = []
_stepped: set[str] = set()
"""Ids of the MLflow runs for which this process has logged a step."""

# MLflow's default of 7 retries takes four minutes; the write queue tries again anyway
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
# MLflow prints the link to each run that ends with all of the server's address, a password in it too; tasks.summary
# prints it without
os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"


def write_queue() -> WriteQueue:
    """The queue of the run that is tracked now. Raises MetronomeError outside `tasks.tracking.tracked_run.tracked`."""
    if not _current:
        raise MetronomeError("nothing is tracked now: this must run inside `with tracking.tracked(config):`")
    return _current[-1][0]


@contextmanager
def mlflow_run(config: Config, known: str | None, keeps_status: bool = False) -> Iterator[mlflow.ActiveRun]:
    """Run the body inside an MLflow run, with a write queue and samples of the machine's load.

    `known`: id of an existing run; None creates one. At the end, `FILES` of the run folder become artifacts. The status
    is FAILED if the body raises, and KILLED if it is cancelled or interrupted; a run that another process has taken
    over goes on there, so its status and files are left alone. With `keeps_status` a known run keeps
    the status that it had. So does a known run whose input is refused before a step of it, and its tags. Raises
    TrackingAway.
    """
    before, run = _started(config, known)
    own = WriteQueue(run.info.run_id)
    load = MachineLoad(own, run.info.run_id, run.info.start_time)
    _current.append((own, config))
    status = "KILLED"
    refused = False
    patience = HURRY_S
    try:
        if not (keeps_status and known):  # an evaluation of a run that is there has settings of its own
            _log_config(own, config, run)
        yield run
        status = "FINISHED"
        patience = FLUSH_S
    except TakenOver:
        status = "RUNNING"  # in the process that writes the run now
        raise
    except BadInput:
        status = "FAILED"
        refused = before is not None and run.info.run_id not in _stepped
        if refused:
            own.do("the tags as they were", partial(_restore_tags, run.info.run_id, run.data.tags))
        raise
    except Exception:
        status = "FAILED"
        raise
    finally:
        load.close()
        if status != "RUNNING" and not refused:
            _log_files(own, config.folder)
        _current.pop()
        _end(before if before and (keeps_status or refused) else status, own.close(patience))


def _started(config: Config, known: str | None) -> tuple[str | None, mlflow.ActiveRun]:
    """The previous status of a known run (None for a new run), and the run, which is now active."""
    if known is None:
        return None, mlflow.start_run(run_name=config.run.name)
    what = f"going on with the MLflow run {known}"
    before = retry_while_away(what, lambda: str(mlflow.MlflowClient().get_run(known).info.status))
    return before, retry_while_away(what, lambda: mlflow.start_run(run_id=known))


def log_samples(step: int) -> None:
    """Log the response samples of about every (train.steps / 20)th step and of the last step."""
    own, config = _current[-1]
    _stepped.add(own.run_id)
    sample = RunFolder(config.folder).responses / f"step-{step:06d}.jsonl"
    due = step % max(1, config.train.steps // SAMPLES) == 0 or step == config.train.steps - 1
    if due and sample.exists():
        own.artifact(sample, "responses")


def log_model_input(path: Path) -> None:
    """Log the base model as an input of the run: an external model with path and content hash, once per experiment.

    This is done in the background, because reading a large model for its hash is slow.
    """
    client = mlflow.MlflowClient()
    own = write_queue()

    def link() -> None:
        digest = content_hash(path)
        experiment = client.get_run(own.run_id).info.experiment_id
        filter_string = f"tags.content_hash = '{digest}'"
        known = client.search_logged_models([experiment], filter_string=filter_string, max_results=1)
        model = (
            known[0]
            if known
            else mlflow.create_external_model(
                metric_name(path.name).replace(".", "_"),
                source_run_id=own.run_id,
                model_type="base",
                experiment_id=experiment,
                params={"path": str(path), "content_hash": digest},
                tags={"content_hash": digest},
            )
        )
        client.log_inputs(own.run_id, models=[LoggedModelInput(model.model_id)])

    own.do("the base model", link)


def cut(value: str) -> str:
    """A parameter's value within MLflow's limit; a value that is cut ends with a note."""
    note = f" ... ({len(value)} characters; whole in config.toml)"
    return value if len(value) <= PARAMETER_LIMIT else value[: PARAMETER_LIMIT - len(note)] + note


def _log_config(own: WriteQueue, config: Config, run: Any) -> None:  # noqa: ANN401
    """Log the parameters, cut to MLflow's limit. MLflow cannot change them, so a value that differs in a resumed run is
    a tag `changed.KEY`."""
    client = mlflow.MlflowClient()
    run_id = run.info.run_id
    before = run.data.params
    parameters = {name: cut(str(value)) for name, value in flatten(config.model_dump(mode="json")).items()}
    fresh = [Param(name, value) for name, value in parameters.items() if name not in before]
    changed = {f"changed.{name}": value for name, value in parameters.items() if before.get(name, value) != value}
    tags = {"metronome.run_folder": str(config.folder.resolve()), "metronome.mode": config.train.mode, **changed}
    if number := identity(config.folder):
        tags[NUMBER] = number
    for start in range(0, len(fresh), PARAMETERS_AT_ONCE):
        part = fresh[start : start + PARAMETERS_AT_ONCE]
        own.do("parameters", partial(client.log_batch, run_id, params=part))
    own.do("tags", lambda: client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()]))


def _restore_tags(run_id: str, before: dict[str, str]) -> None:
    client = mlflow.MlflowClient()
    for name in client.get_run(run_id).data.tags.keys() - before.keys():
        client.delete_tag(run_id, name)
    client.log_batch(run_id, tags=[RunTag(name, value) for name, value in before.items()])


def _log_files(own: WriteQueue, folder: Path) -> None:
    for path in (folder / name for name in FILES):
        if path.exists():
            own.artifact(path)


def _end(status: str, missing: list[str]) -> None:
    """Set the run's status. If the server does not answer, the status stays RUNNING, and a warning says so."""
    if missing:  # the queue has waited for the server already
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"], before = "0", os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"]
    try:
        mlflow.end_run(status)
    except STORE_ERRORS as error:
        complain(f"warning: MLflow still shows this run as RUNNING, but it is {status}: {first_line(error)}")
    finally:
        if missing:
            os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = before
