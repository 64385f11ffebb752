"""Starts the orchestrator and follows its events. The orchestrator ends whenever `run_training` ends."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine import errors
from engine.config import Config
from engine.errors import DeadlineError, MetronomeError, ProcessDied
from engine.run.commands import orchestrator_command
from engine.run.disk import named_disk_errors
from engine.run.event_stream import EventReader, Kind
from engine.run.folder import RunFolder, dump_config
from engine.run.limits import checkpoint_size, saving_s, stored_parameters
from engine.run.process import Child
from engine.run.progress import Progress, folder_size, format_size
from engine.run.run_inputs import record_inputs
from engine.types import JsonObject
from tasks.attempt import run_folder, show_in_folder
from tasks.terminal.console import say
from tasks.terminal.interruption import say_stopping, signal_of
from tasks.terminal.progress_display import show_progress, since_now

PAUSE_S = 5.0
"""Longest silence in seconds that is counted between two reads."""
STOP_S = 9.0
"""Seconds that the orchestrator has to end its children. Then it is killed, and lifelines end the children. After a
signal, the time for a checkpoint (`limits.saving_s`) comes first."""


def run_training(
    config: Config,
    resume: bool = False,
    replay: Path | None = None,
    on_step: Callable[[JsonObject], None] = lambda row: None,
) -> RunFolder:
    """Train in an orchestrator process. `on_step` gets each new line of steps.jsonl. `model.path` must be a folder.
    Prints the progress of the training and the orchestrator's notices.

    Raises the error that ended the run: BadInput, or another MetronomeError with the orchestrator's message. No process
    is left behind. A signal that ends this process is passed on to the orchestrator.
    """
    folder = run_folder(config)
    folder.failure.unlink(missing_ok=True)  # left by an earlier attempt
    if folder.fence.attempt:
        with named_disk_errors(folder.path), show_progress("train", since_now("comparing model and code")):
            record_inputs(config)
    with tempfile.TemporaryDirectory(prefix="metronome-config-") as scratch:
        file = Path(scratch) / "config.toml"
        dump_config(config, file)
        reader = EventReader()
        command = orchestrator_command(file, resume, replay, events=reader.writer, attempt=folder.fence.attempt)
        child = _start(command, folder, reader)
        told = _Told(folder, on_step)
        try:
            with reader, show_progress("train", lambda: told.progress):
                code = _follow(child, reader, told, Silence(child, config))
        except BaseException as ended:
            _stop(child, signal_of(ended), config)
            raise
        finally:
            told.close()
        child.stop(STOP_S)
    if told.failure is not None:
        raise told.failure
    if code:
        raise ProcessDied(f"the orchestrator {child.how_it_ended()}")
    return folder


def _start(command: Sequence[str], folder: RunFolder, reader: EventReader) -> Child:
    lock = [] if folder.fence.lock is None else [folder.fence.lock]  # which it holds, too, until it ends
    try:
        return Child("orchestrator", command, folder.logs / "orchestrator.log", pass_fds=[reader.writer, *lock])
    finally:
        os.close(reader.writer)


class _Told:
    """What the orchestrator tells: prints its notices, passes its steps on, and shows its progress in the run
    folder."""

    def __init__(self, folder: RunFolder, on_step: Callable[[JsonObject], None]) -> None:
        self._folder = folder
        self._on_step = on_step
        self.failure: MetronomeError | None = None
        """The error that ended the run."""
        self.progress = Progress("starting the orchestrator")
        self._show_progress(self.progress)

    def take(self, kind: Kind, content: Any) -> None:  # noqa: ANN401
        """Take the next event."""
        if kind == "step":
            self._on_step(content)
        elif kind == "notice":
            say(*content)
        elif kind == "progress":
            self._show_progress(Progress(*content))
        else:
            name, message = content
            self.failure = getattr(errors, name, MetronomeError)(message)

    def close(self) -> None:
        """Nothing is in progress any more."""
        show_in_folder(self._folder, None)

    def _show_progress(self, progress: Progress) -> None:
        self.progress = progress
        show_in_folder(self._folder, progress)


def _stop(child: Child, number: signal.Signals | None, config: Config) -> None:
    """Stop the orchestrator after an error, or after a signal (`number`), which is passed on to it, and show how much
    of the trainer's checkpoint is written."""
    if number is None:
        child.stop(STOP_S)
        return
    say_stopping(saving_s(config))
    whole = checkpoint_size(config, stored_parameters(Path(config.model.path)))
    with show_progress("stop", lambda: _saved_part(RunFolder(config.folder).checkpoints, whole)):
        child.stop(saving_s(config) + STOP_S, number)


def _saved_part(root: Path, whole: float) -> Progress:
    """How much of the checkpoint that is being written is there. `whole`: its bytes at the end."""
    size = sum(folder_size(partial) for partial in root.glob(".step-*.partial"))
    if not size:
        return Progress("the trainer ends its micro-batch, and the processes end")
    return Progress(f"{format_size(size)} of {format_size(int(whole))} saved", min(1.0, size / whole))


class Silence:
    """Notices an orchestrator that hangs or was stopped, early enough to end it within 2 x train.timeout_s. The
    orchestrator itself enforces all other deadlines of a run."""

    def __init__(self, child: Child, config: Config) -> None:
        self._child = child
        timeout_s = config.train.timeout_s
        self._limit_s, self._limit_text = max(
            (2 * timeout_s - STOP_S, f"2 x train.timeout_s, less {STOP_S:g} s to end in"),
            (timeout_s, "train.timeout_s"),
        )
        self._start_s = config.rollout.timeout_s
        """Additional seconds before the orchestrator's first sign of life, because it may wait for a lock."""
        self._silence_s = 0.0
        self._looked = time.monotonic()

    def look(self, heard: bool) -> None:
        """Note whether there was a sign of life since the last call. Raise DeadlineError if there was none for too
        long."""
        now = time.monotonic()
        # if this process slept as well, only a moment of the pause counts
        self._silence_s += min(now - self._looked, PAUSE_S)
        self._looked = now
        if heard:
            self._silence_s = 0.0
            self._start_s = 0.0
        limit = self._limit_s + self._start_s
        if self._silence_s > limit:
            raise DeadlineError(
                f"the orchestrator (process {self._child.pid}) gave no sign of life for {limit:g} s ({self._limit_text}"
                + (" + rollout.timeout_s" if self._start_s else "")
                + f"): it hangs or was stopped, and is ended; its log: {self._child.log}"
            )


def _follow(child: Child, reader: EventReader, told: _Told, silence: Silence) -> int:
    """Pass the orchestrator's events on until it ends. Return its exit status.

    Raises DeadlineError if the orchestrator hangs.
    """
    while True:
        code = child.process.poll()  # before the events are read, so that those of an ended one are all there
        events = reader.read(0.3 if code is None else 0.0)
        for kind, content in events:
            told.take(kind, content)
        if code is not None:
            return code
        silence.look(bool(events))
