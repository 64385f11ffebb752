"""Lets a flow run enter its run folder: for the first time, after a crash, or because a person resumes the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect.runtime import deployment, flow_run

from engine.config import Config
from engine.errors import BadInput, MetronomeError
from engine.run.files import write_atomically
from engine.run.folder import RunFolder
from engine.run.identity import claim_run
from engine.run.lock import hold_lock
from engine.run.run_file import FILE, RunStart, read_run, update_run
from engine.run.run_status import why_ended
from tasks.attempt import Stages, count_attempt, write_fenced
from tasks.stages.input_checks import check_run_folder
from tasks.terminal.console import print_error, say
from tasks.tracking.run_page import draw_at_end
from tasks.tracking.store import TrackingAway

TAKEOVER_S = 600.0
"""Seconds to wait for the previous attempt to end, counted from its last step or stage. A flow that Prefect believes
dead may still run on a node that has lost its connection to the server, and train to the end."""
NAMES = ".flow-runs"
"""Folder in `run.output` with one file for each Prefect flow run. The file contains the flow run's run.name."""


def read_settled_config(config: Config) -> Config:
    """The config with which this flow run began, from its run folder; the recipe may have been edited since.

    On the first entry, return the given config and store its run.name, because a name made from the time must not
    change.
    """
    file = _name_file(config)
    if file is None:
        return config
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, config.run.name)
    if not (name := file.read_text(errors="replace")) or not name.isprintable() or "\ufffd" in name:
        raise BadInput(
            f"{file}: the name of this flow run's run is lost, because the file is damaged; write the name into the "
            "file"
        )
    named = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    folder = RunFolder(named.folder)
    return folder.read_config() if begun_by_this_flow(folder) and folder.config.exists() else named


@contextmanager
def enter_flow(config: Config, begun: RunStart, resume: bool) -> Iterator[Stages]:
    """Hold the lock of the run folder during the body, store the config and `begun` in it, and yield its finished
    stages.

    A flow run may enter its own folder again; any other flow run needs `resume`. Raises BadInput if the folder belongs
    to another run or is in use, and MetronomeError if the run makes no progress
    (`tasks.attempt.count_attempt`). If MLflow does not answer, see `crashed_without_tracking`.
    """
    folder = RunFolder(config.folder)
    signed = {"flow_run": str(flow_run.root_flow_run_id)}
    again = begun_by_this_flow(folder)
    if not again:
        check_run_folder(config, resume)
    locked = hold_lock(
        folder.lock,
        f"run folder {folder.path}",
        TAKEOVER_S if again else 0.0,
        waiting=lambda message: say("wait", message),
        progress=lambda: _written(folder),
    )
    with locked as lock, write_fenced(folder, lock):
        claim_run(config, again or resume)
        why = why_ended(folder)[1] if again else "started by a person or a schedule"
        try:
            count_attempt(folder, "flow", config.run.resumes, why, by_hand=not again)
        except MetronomeError as error:
            folder.write_failure(error)
            draw_at_end(folder)
            raise
        if not folder.config.exists():
            update_run(folder.path, **signed)  # before the config: one without a flow run counts as another run's
        update_run(folder.path, start=begun)
        folder.create(config, resume=again or resume)
        update_run(folder.path, **signed)  # after the config, which until now may be the previous flow run's
        if again:
            say("resume", f"the previous attempt ended: {why}")
        with crashed_without_tracking():
            try:
                yield Stages(folder, again or resume)
            except TrackingAway as error:
                folder.write_failure(error)
                raise


@contextmanager
def crashed_without_tracking() -> Iterator[None]:
    """If MLflow does not answer, end a deployment's flow run as crashed, because crashed runs are resumed
    (tasks.cluster.watchdog)."""
    try:
        yield
    except TrackingAway as error:
        if not deployment.id:
            raise
        print_error(f"error: {error}")
        raise SystemExit(str(error)) from error


def begun_by_this_flow(folder: RunFolder) -> bool:
    """Whether this flow run has entered the folder before."""
    return read_run(folder.path).flow_run == str(flow_run.root_flow_run_id)


def _written(folder: RunFolder) -> list[int]:
    """The sizes of steps.jsonl and run.json, which grow while the holder of a run folder makes progress."""
    return [file.stat().st_size if file.exists() else 0 for file in (folder.steps, folder.path / FILE)]


def _name_file(config: Config) -> Path | None:
    number = flow_run.root_flow_run_id
    return Path(config.run.output) / NAMES / str(number) if number else None
