"""A stage of a run, and the finished stages, which the run folder stores. A resumed run does not repeat them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from engine.config import Config
from engine.errors import MetronomeError, Stopped, counted
from engine.run.checkpoint_files import latest_checkpoint, step_of
from engine.run.folder import RunFolder
from engine.run.progress import Progress, write_progress
from engine.run.run_file import Fence, Start, read_run, update_run
from tasks.terminal import console
from tasks.terminal.interruption import signal_of

_held: list[Fence] = []
"""The fences of the run folders that this process has entered."""


@contextmanager
def write_fenced(folder: RunFolder, lock: int) -> Iterator[None]:
    """During the body, this process writes to the folder, in the attempts that the body begins. `lock`: the open file
    that holds the folder's lock.

    If a signal ends the body, failure.json names the signal.
    """
    folder.fence = Fence(folder.path, lock=lock)
    _held.append(folder.fence)
    try:
        yield
    except BaseException as ended:
        note_signal(folder, ended)
        raise
    finally:
        _held.remove(folder.fence)


def note_signal(folder: RunFolder, ended: BaseException) -> bool:
    """Whether a signal ended a run. If no other reason is in failure.json, name the signal there."""
    if (number := signal_of(ended)) is None:
        return False
    if folder.last_failure() is None:
        folder.write_failure(Stopped(f"ended by {number.name}"))
    return True


@contextmanager
def evaluation_failure(folder: RunFolder) -> Iterator[None]:
    """If an evaluation, the body, fails, write its reason to failure.json, and none if it succeeds. The folder of a
    training is left alone: its failure.json says how the training ended."""
    if folder.steps.exists():
        yield
        return
    folder.failure.unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        folder.write_failure(error)
        raise


def run_folder(config: Config) -> RunFolder:
    """The run's folder. If this process has entered it, the folder carries the process's right to write."""
    folder = RunFolder(config.folder)
    folder.fence = next((fence for fence in _held if fence.folder == folder.path), folder.fence)
    return folder


def show_in_folder(folder: RunFolder, progress: Progress | None) -> None:
    """Show whoever looks at a run folder what is in progress; None: nothing is. Nothing depends on it."""
    if not folder.fence.is_passed:
        with suppress(OSError):
            folder.progress.unlink(missing_ok=True) if progress is None else write_progress(folder.progress, progress)


REGISTER = "register"
"""Name of the stage that registers the policy."""

Result = TypeVar("Result")


class Stages:
    """The finished stages of a run by name, each with its result (any value that JSON can store)."""

    def __init__(self, folder: RunFolder, resumed: bool = False) -> None:
        """`resumed`: whether training continues from a checkpoint if there is one."""
        self.resumed = resumed
        self._folder = folder
        self.done = read_run(folder.path).stages

    def once(self, name: str, work: Callable[[], Result]) -> Result:
        """Return the stored result of a stage. If the stage is not done, run `work` now and store its result.

        Raises TakenOver if another flow writes the run.
        """
        if name not in self.done:
            self._folder.fence.check_attempt()
            self.done[name] = work()
            self._write()
        found: Result = self.done[name]
        return found

    @contextmanager
    def shown(self, name: str) -> Iterator[None]:
        """During the body, who looks at the run folder sees this stage. Training writes its progress there itself."""
        show_in_folder(self._folder, Progress(name))
        try:
            yield
        finally:
            show_in_folder(self._folder, None)

    def forget_stages(self, *names: str) -> None:
        """Remove stages, so that they run again."""
        self.done = {name: result for name, result in self.done.items() if name not in names}
        self._write()

    def _write(self) -> None:
        self._folder.fence.check_attempt()
        update_run(self._folder.path, stages=self.done)


@dataclass
class EnteredRun:
    """A run whose folder this process has entered, as its stages see it."""

    config: Config
    """After the stage `base model`, model.path is a checked folder."""
    train: Callable[[Config], int]
    """Trains, as a task of a flow or in this process; returns the number of steps."""
    finished: Stages
    recipe: str = ""
    """What another flow reads to repeat the run: the recipe, or for a resumed run its own config.toml."""
    overrides: list[str] = field(default_factory=list)
    """The settings, overrides and seed of the run, in the form of `--set`."""
    registered: str = ""
    """Name of the registered model to which the policy belongs."""
    pool_instances: int = 0
    """Number of instances on the rollout pool."""

    @property
    def model(self) -> Path:
        """The folder of the model that training starts from."""
        return Path(self.config.model.path)

    @property
    def policy(self) -> Path:
        """The folder of the trained policy."""
        return RunFolder(self.config.folder).policy


@dataclass(frozen=True)
class RunStage:
    """A stage of a run."""

    name: str
    """Its name, under which run.json has its result once it is finished. {steps} stands for train.steps."""
    work: Callable[[EnteredRun], Any]
    """Runs it; returns its result."""
    text: Callable[[Any], str] | None
    """Its result as text for the console. None: the stage prints nothing."""
    needs: tuple[str, ...] = ()
    """Names of the stages before it whose results it uses."""
    is_stored: bool = True
    """Whether it is finished once its result is in run.json. Else it is run in every process."""

    def run(self, run: EnteredRun) -> None:
        """Run the stage unless it is finished. Print its start and its result."""
        if self.text is None:
            self._result(run)
            return
        name = self.name.partition(" version ")[0]
        shown = nullcontext() if self is TRAIN else run.finished.shown(name)
        with console.print_stage(name) as say, shown:
            say(self.text(self._result(run)))

    def stored_name(self, run: EnteredRun) -> str:
        """Its name in run.json of this run."""
        return self.name.format(steps=run.config.train.steps)

    def _result(self, run: EnteredRun) -> Any:  # noqa: ANN401
        return run.finished.once(self.stored_name(run), lambda: self.work(run)) if self.is_stored else self.work(run)


TRAIN = RunStage("train", lambda run: run.train(run.config), lambda steps: counted(steps, "step"), ("base model",))


def count_attempt(folder: RunFolder, what: Start, limit: int, why: str, by_hand: bool = False) -> int:
    """Begin an attempt: a start of the flow or of its training (`what`). `why`: what ended the previous one.

    Return the number of earlier starts from the same point. Raises MetronomeError if that number exceeds `limit`, the
    number of resumes in a row that may pass without a new stage or checkpoint. A start by a person (`by_hand`) resets
    the count.
    """
    here = read_progress(folder)
    starts = 0 if by_hand else _starts_from(folder, what, here)
    if starts > limit:
        raise MetronomeError(
            f"the {what} of run {folder.path.name} was started {starts} times from the same point ({_named(here)}) "
            f"and got no further; not resumed again (run.resumes = {limit}). Last failure: {why}"
        )
    folder.fence.begin_attempt(what, why, here, by_hand)
    return starts


def read_progress(folder: RunFolder) -> tuple[int, int]:
    """The progress of a run: number of finished stages, and step of its newest complete checkpoint (-1: none)."""
    checkpoint = latest_checkpoint(folder.checkpoints)
    return len(read_run(folder.path).stages), -1 if checkpoint is None else step_of(checkpoint)


def _starts_from(folder: RunFolder, what: str, here: tuple[int, int]) -> int:
    """The number of latest consecutive starts of `what` from the point `here`, counted since a person last started the
    run."""
    starts = 0
    for one in reversed(read_run(folder.path).attempts):
        starts += one.what == what and one.progress == here
        if one.by_hand or (one.what == what and one.progress != here):
            break
    return starts


@dataclass(frozen=True)
class RegisteredPolicy:
    """What became of a run's policy in MLflow's registry."""

    name: str
    version: str
    wins: bool
    """Whether it became champion."""
    reason: str
    """Why it did or did not."""

    @property
    def verdict(self) -> str:
        """Whether it became champion, and why."""
        return f"{'champion' if self.wins else 'not champion'}: {self.reason}"


def registered_policy(folder: RunFolder) -> RegisteredPolicy | None:
    """The result of the stage `register`; None if it is not done. Raises BadInput for a damaged run.json."""
    found = read_run(folder.path).stages.get(REGISTER)
    return None if found is None else RegisteredPolicy(**found)


def _named(here: tuple[int, int]) -> str:
    stages, step = here
    at = f"checkpoint after {counted(step, 'step')}" if step >= 0 else "no checkpoint"
    return f"{counted(stages, 'stage')} done, {at}"
