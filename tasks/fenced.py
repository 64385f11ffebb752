"""The right of a flow, or of `metronome train`, to write to its run folder (engine.run.fence)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine.config import Config
from engine.errors import Stopped
from engine.run.fence import Fence
from engine.run.folder import RunFolder
from tasks.interruption import signal_of

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
        if (number := signal_of(ended)) is not None and folder.last_failure() is None:
            folder.write_failure(Stopped(f"ended by {number.name}"))
        raise
    finally:
        _held.remove(folder.fence)


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
