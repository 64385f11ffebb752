"""Tracks a run in MLflow: one MLflow run per run folder, in a local sqlite store unless a tracking URI is given.

A store that cannot be used when a run begins is an error. Later, the run folder is mirrored whenever the store answers
(tasks/tracking/mirror.py).
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

import mlflow
from mlflow.entities import Run

from engine.config import Config
from engine.errors import BadInput, TakenOver, without_password
from engine.model.shape import content_hash
from engine.run.files import write_atomically
from engine.run.progress import folder_size
from engine.run.run_file import read_run
from tasks.attempt import note_signal, run_folder
from tasks.terminal.console import own_program, print_error
from tasks.terminal.progress_display import copied, show_progress, since_now
from tasks.tracking import run_page
from tasks.tracking.mirror import Mirror, MirrorThread
from tasks.tracking.mlflow_model import model_files
from tasks.tracking.others import CLOSE_S, OtherTrackers, check_others
from tasks.tracking.store import (
    STORE_ERRORS,
    first_line,
    is_refused,
    retry_conflicts,
    retry_while_away,
    sqlite_file,
    whole_store,
)

RUN_ID = "mlflow_run_id"
"""File in the run folder with the id of its MLflow run, so that a resumed run continues the same MLflow run."""

MLFLOW_ID = re.compile("[0-9a-f]{32}")

POLICY_HASH = "metronome.policy_hash"
"""Tag of a registered version with the hash of its files' contents."""

_ELSEWHERE = "name the store that has it, or delete that file: the run is then a new one in MLflow"
"""The remedy if a store does not have a run's MLflow run."""

NUMBER = "metronome.run_id"
"""Tag with the run's number (engine.run.identity). The checkpoints also have the number, so it survives the loss of the
run folder."""
HURRY_S = 4.0
"""Seconds that the end of a failed or cancelled run waits for MLflow."""
UI = "http://127.0.0.1:5000"
"""Address of `mlflow ui`, for a store without a server."""
NO_TAGS: Mapping[str, str] = MappingProxyType({})

# MLflow's default of 7 retries takes four minutes; the next pass tries again anyway
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
# MLflow prints the link to each finished run with the server's whole address, including a password;
# tasks.stages.summary prints it without
os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"


def tracking_uri(config: Config) -> str:
    """`tracking.uri`, else MLFLOW_TRACKING_URI, else the sqlite store in `run.output`."""
    given = config.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    return given or f"sqlite:///{Path(config.run.output).resolve() / 'mlflow.db'}"


def shown_uri(config: Config) -> str:
    """`tracking_uri` for messages and links, without the password that MLFLOW_TRACKING_URI may contain."""
    return without_password(tracking_uri(config))


def has_server(config: Config) -> bool:
    """Whether the store is a server, which has its own pages."""
    return tracking_uri(config).startswith(("http://", "https://"))


def ui_command(config: Config) -> str:
    """The command that starts the UI of a store without a server, with this environment's mlflow."""
    return shlex.join([own_program("mlflow"), "ui", "--backend-store-uri", shown_uri(config)])


def ui_address(config: Config) -> str:
    """Address of the UI: that of the server, or the one where `ui_command` starts it."""
    return (shown_uri(config) if has_server(config) else UI).rstrip("/")


def page_rows(config: Config) -> dict[str, str]:
    """Rows of the table at the end of a run: the page with its experiment's runs, or the UI's first page if the store
    does not tell the experiment's id, and, for a store without a server, the command that serves it."""
    page = ui_address(config)
    with suppress(*STORE_ERRORS):  # do not wait: the run is over, and its figures are in its folder
        found = mlflow.MlflowClient(tracking_uri(config)).get_experiment_by_name(config.tracking.experiment)
        page += f"/#/experiments/{found.experiment_id}/runs" if found is not None else ""
    return {"MLflow": page} if has_server(config) else {"MLflow UI": ui_command(config), "its page": page}


@contextmanager
def track_run(config: Config, tags: Mapping[str, str] = NO_TAGS) -> Iterator[str]:
    """Mirror the run folder in its MLflow run during the body; yields the MLflow run's id. `tags`: further tags.

    If the folder names no MLflow run but has the run's number, the MLflow run is found by this number: the run folder
    was lost, and the run continues from its checkpoints. Otherwise an MLflow run is created. Its status is FAILED if
    the body raises, and KILLED if the body is cancelled or interrupted. The folder is completed first: an error or a
    signal is written to failure.json, and then the page is drawn. A run that another process has taken over is left
    alone, because it continues there. A known run whose input is refused before a step is left unchanged.

    Raises BadInput if MLflow refuses the store, or if the store does not answer at the start of a new run. Raises
    TrackingAway if the store does not answer for long when a run is resumed.
    """
    before, run = _started(config, find_run(config))
    run_id = run.info.run_id
    others = OtherTrackers(config)
    mirror = Mirror(run, config, {**_tags(config), **tags}, also=others.log)
    thread = MirrorThread(mirror, run_id)
    status = "KILLED"
    patience = HURRY_S
    refused = False
    draw_s = run_page.DRAW_S
    try:
        yield run_id
        status = "FINISHED"
        patience = CLOSE_S
    except TakenOver:
        status = "RUNNING"  # the run continues in another process
        thread.stop()
        raise
    except Exception as error:
        status = "FAILED"
        refused = isinstance(error, BadInput)
        if not refused or before is None:  # else the run may stay as it is
            run_folder(config).write_failure(error)
        raise
    except BaseException as ended:
        if note_signal(run_folder(config), ended):
            draw_s = run_page.HURRY_S
        raise
    finally:
        if status != "RUNNING":
            run_page.draw_at_end(run_folder(config), draw_s)
        missing = thread.close(patience, refused)
        _end(before if refused and before and not mirror.is_settled else status, missing)
        others.close(patience)


def find_run(config: Config, waits: bool = False) -> str | None:
    """Id of the run folder's MLflow run; None if there is none yet. Sets MLflow to the config's store and experiment.

    Raises BadInput if MLflow cannot use the store, and TrackingAway if MLflow does not answer for an existing run, or,
    with `waits`, for any run.
    """
    config.folder.mkdir(parents=True, exist_ok=True)
    known = _known(config)

    def connect() -> str | None:
        experiment = _connect(config)
        return known or _with_number(config, experiment)

    try:
        if known or waits:
            return retry_while_away(
                f"continuing the MLflow run {known}" if known else "logging the evaluation", connect
            )
        return connect()
    except STORE_ERRORS as error:
        raise _unusable(config, error) from None


def create_run(config: Config) -> mlflow.ActiveRun:
    """Create an MLflow run for a run folder, and store its id there."""
    run = mlflow.start_run(run_name=config.run.name, tags=_tags(config))
    write_atomically(config.folder / RUN_ID, run.info.run_id)
    return run


def _started(config: Config, known: str | None) -> tuple[str | None, Run]:
    """The previous status of a known run (None for a new run), and the run, which is now active."""
    if known is None:
        return None, create_run(config)
    what = f"continuing the MLflow run {known}"
    before = retry_while_away(what, lambda: str(mlflow.MlflowClient().get_run(known).info.status))
    run = retry_while_away(what, lambda: mlflow.start_run(run_id=known))
    write_atomically(config.folder / RUN_ID, known)
    return before, run


def _tags(config: Config) -> dict[str, str]:
    tags = {"metronome.run_folder": str(config.folder.resolve())}
    number = read_run(config.folder).id
    return {**tags, NUMBER: number} if number else tags


def _end(status: str, missing: list[str]) -> None:
    """Set the run's status. If the server does not answer, the status stays RUNNING, and a warning says so."""
    if missing:  # close() has already waited for the server
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"], before = "0", os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"]
    try:
        mlflow.end_run(status)
    except STORE_ERRORS as error:
        print_error(f"warning: MLflow still shows this run as RUNNING, but it is {status}: {first_line(error)}")
    finally:
        if missing:
            os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = before


def _known(config: Config) -> str | None:
    """The MLflow run that the run folder names. A damaged id counts as none; the run is then found by its number."""
    file = config.folder / RUN_ID
    text = file.read_text(errors="replace").strip() if file.exists() else ""
    return text if MLFLOW_ID.fullmatch(text) else None


def check_known(config: Config) -> None:
    """Check that the store has the MLflow run of the run folder, in `tracking.experiment`. Raises BadInput if not, or
    if MLflow refuses the store. Writes nothing. Accepts a store that does not answer, because `track_run` waits for it
    later."""
    if (known := _known(config)) is None:
        return
    what = f"the run's MLflow run {known} (named in {config.folder / RUN_ID})"
    if (store := sqlite_file(tracking_uri(config))) is not None and not store.exists():
        raise BadInput(f"tracking.uri = {shown_uri(config)!r}: there is no such store for {what}; {_ELSEWHERE}")
    try:
        _use(tracking_uri(config))
        client = mlflow.MlflowClient()
        experiment = client.get_experiment(client.get_run(known).info.experiment_id).name
    except STORE_ERRORS as error:
        if is_refused(error):
            raise BadInput(
                f"tracking.uri = {shown_uri(config)!r}: {what} is not in this store: {first_line(error)}; {_ELSEWHERE}"
            ) from None
        return
    if experiment != config.tracking.experiment:
        raise BadInput(
            f"tracking.experiment = {config.tracking.experiment!r}: {what} is in {experiment!r} and stays there; leave "
            "the key out"
        )


def check_store(config: Config, trains: bool = False) -> None:
    """Check MLflow's store and the packages of `tracking.also` before an evaluation, or before a run that `trains` and
    has no MLflow run yet. Raises BadInput if MLflow refuses the store or a package is missing. A store that does not
    answer is bad input for a training; an evaluation needs none, so it gets a warning."""
    check_others(config)
    if trains and _known(config) is not None:
        return
    try:
        with show_progress("start", since_now("opening MLflow's store")):
            _connect(config)
    except STORE_ERRORS as error:
        if trains or is_refused(error):
            raise _unusable(config, error) from None
        print_error(
            f"warning: MLflow ({shown_uri(config)}) does not answer: {first_line(error)}. The evaluation continues "
            "and is logged afterwards"
        )


def _unusable(config: Config, error: Exception) -> BadInput:
    return BadInput(
        f"tracking.uri = {shown_uri(config)!r}, experiment {config.tracking.experiment!r}: "
        f"MLflow cannot use it: {first_line(error)}"
    )


def register_version(name: str, policy: Path) -> str:
    """Store a Hugging Face folder in the active run as a model of MLflow (tasks.tracking.mlflow_model), and register it
    as a version of model `name`; returns the version.

    A repeated call, for example after a kill, returns the first call's version: the run's version with this content.
    """
    run = mlflow.active_run()
    assert run is not None
    client = mlflow.MlflowClient()
    with show_progress("register", since_now("reading the policy's files")):
        digest = content_hash(policy)
    made = [
        version
        for version in client.search_model_versions(f"name = {quote_name(name)} and run_id = '{run.info.run_id}'")
        if version.tags.get(POLICY_HASH) == digest
    ]
    if made:
        return str(made[0].version)
    _upload(client, run.info.run_id, policy)
    if not client.search_registered_models(f"name = {quote_name(name)}"):
        client.create_registered_model(name, description="Policies post-trained by Metronome")
    source = mlflow.get_artifact_uri("policy")
    return str(client.create_model_version(name, source, run.info.run_id, tags={POLICY_HASH: digest}).version)


def quote_name(name: str) -> str:
    """The name in the quotes of a filter of MLflow, which has no escapes: a name with both kinds can't be searched."""
    return f'"{name}"' if "'" in name else f"'{name}'"


def _upload(client: mlflow.MlflowClient, run_id: str, policy: Path) -> None:
    """Store the model as the artifacts `policy/`, one file after the other, and show the progress."""
    sizes: list[int] = []
    shown = show_progress("register", copied("uploaded to MLflow", lambda: sum(sizes), folder_size(policy)))
    with tempfile.TemporaryDirectory(prefix="metronome-") as scratch, shown:
        for path, place in model_files(policy, Path(scratch)):
            client.log_artifact(run_id, str(path), str(Path("policy", place)))
            sizes.append(path.stat().st_size)


def _connect(config: Config) -> str:
    """Make the config's experiment the current one; returns its id."""
    _use(tracking_uri(config))
    experiment = retry_conflicts(lambda: _experiment(config))
    mlflow.set_experiment(experiment_id=experiment)
    return experiment


def _with_number(config: Config, experiment: str) -> str | None:
    """Id of the newest MLflow run in the experiment that has this name and the run folder's number; None if there is
    none."""
    number = read_run(config.folder).id
    if not number.isalnum():  # no number, or an invalid one, since it comes from a checkpoint
        return None
    runs = mlflow.MlflowClient().search_runs([experiment], f"tags.`{NUMBER}` = '{number}'")
    return next((str(run.info.run_id) for run in runs if run.info.run_name == config.run.name), None)


def _use(uri: str) -> None:
    """Set MLflow's store, but restore the environment variable that MLflow sets as well, because it is the user's
    setting for later runs. Raises BadInput for a folder."""
    if uri.startswith("file:") or ":" not in uri and uri != "databricks":
        raise BadInput(
            f"tracking.uri = {uri!r}: a folder keeps a figure as often as it is sent; give sqlite:///FILE.db, another "
            "database or a server (`mlflow migrate-filestore` copies its runs)"
        )
    before = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(whole_store(uri))
    if before is None:
        os.environ.pop("MLFLOW_TRACKING_URI", None)
    else:
        os.environ["MLFLOW_TRACKING_URI"] = before


def _experiment(config: Config) -> str:
    """Id of the experiment, which is created if needed. Artifacts of a sqlite store go to a folder next to the store,
    not to the current folder."""
    found = mlflow.get_experiment_by_name(config.tracking.experiment)
    if found is not None:
        return str(found.experiment_id)
    place = Path(config.run.output).resolve() / "mlartifacts"
    ours = tracking_uri(config).startswith("sqlite:")
    if ours:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)  # as run folders: it has copies of what is in them
    return str(mlflow.create_experiment(config.tracking.experiment, artifact_location=place.as_uri() if ours else None))
