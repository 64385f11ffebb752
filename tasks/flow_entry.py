"""How a flow run enters its run folder: for the first time, again after a crash,
or to go on with a run by a person's wish."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect.runtime import deployment, flow_run

from engine.config import Config
from engine.config.recipe import load
from engine.run.files import write_atomically
from engine.run.folder import RunFolder
from engine.run.identity import claim
from engine.run.lock import hold_lock
from engine.run.start import RunStart
from tasks.console import complain, say
from tasks.finished_stages import Stages, count_attempt, last_end
from tasks.input_checks import check_run_folder
from tasks.tracking.retry import TrackingAway

TAKEOVER_S = 600.0
"""How long the attempt before may go on: a flow that was taken for dead may be alive
on a node cut off from the server."""
NAMES = ".flow-runs"
"""Folder in `run.output` with a file for each Prefect flow run: the run.name that it got."""


def settled(config: Config) -> Config:
    """The config that this flow run began with, from its run folder: the recipe may have been edited since.

    On its first entry it is the config as given; its run.name is kept, since one made of the time must not change.
    """
    file = _name_file(config)
    if file is None:
        return config
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, config.run.name)
    named = config.model_copy(update={"run": config.run.model_copy(update={"name": file.read_text()})})
    folder = RunFolder(named.folder)
    return load(folder.config) if begun_by_this_flow(folder) and folder.config.exists() else named


class Entry(Stages):
    """A run folder that a flow run is in, with the stages that are done."""

    def __init__(self, folder: RunFolder, resumed: bool) -> None:
        super().__init__(folder)
        self.resumed = resumed
        """Whether training goes on from a checkpoint, if there is one."""


@contextmanager
def entered(config: Config, begun: RunStart, resume: bool) -> Iterator[Entry]:
    """Hold the run folder during the body; it keeps config and `begun`.

    A flow run may enter its own folder again; another one needs `resume`. Raises BadInput (the folder is another run's,
    or in use), MetronomeError when the run does not get any further (`tasks.finished_stages.count_attempt`). Without
    MLflow: see `crashed_without_tracking`.
    """
    folder = RunFolder(config.folder)
    again = begun_by_this_flow(folder)
    if not again:
        check_run_folder(config, resume)
    with hold_lock(
        folder.lock, f"run folder {folder.path}", TAKEOVER_S if again else 0.0, lambda message: say("wait", message)
    ):
        claim(folder.path, config, again or resume)
        why = last_end(folder) if again else "started by a person or a schedule"
        count_attempt(folder, "flow", config.run.resumes, why, by_hand=not again)
        if not folder.config.exists():
            _sign(folder)  # before the config: a folder with one and no flow run would be taken for another run's
        begun.write(folder.path)
        folder.create(config, resume=again or resume)
        _sign(folder)  # after it: the config before may be that of the flow run before, with other settings
        if again:
            say("resume", f"the attempt before ended: {why}")
        entry = Entry(folder, again or resume)
        if entry.done.get("train", config.train.steps) != config.train.steps:  # a person wants more steps of it
            entry.forget("train", "publish", "register", "announce")
        with crashed_without_tracking():
            try:
                yield entry
            except TrackingAway as error:
                folder.fail(error)
                raise


@contextmanager
def crashed_without_tracking() -> Iterator[None]:
    """A flow run of a deployment that MLflow is away from ends as crashed:
    that is what is resumed (tasks.cluster.watchdog)."""
    try:
        yield
    except TrackingAway as error:
        if not deployment.id:
            raise
        complain(f"error: {error}")
        raise SystemExit(str(error)) from error


def begun_by_this_flow(folder: RunFolder) -> bool:
    """Whether this flow run was in the folder before."""
    file = folder.path / "flow_run_id"
    return file.exists() and file.read_text() == str(flow_run.root_flow_run_id)


def _sign(folder: RunFolder) -> None:
    write_atomically(folder.path / "flow_run_id", str(flow_run.root_flow_run_id))


def _name_file(config: Config) -> Path | None:
    number = flow_run.root_flow_run_id
    return Path(config.run.output) / NAMES / str(number) if number else None
