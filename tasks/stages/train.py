"""Train: runs the orchestrator, sends its steps to the console, MLflow and Prefect, and restarts it if it dies.

The Prefect UI shows a progress bar with step, reward, speed, time left and the command that shows the run. A thread
sends it every 10 s, so a slow or unresponsive server delays neither training nor MLflow.
"""

from __future__ import annotations

import contextvars
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
from prefect import task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from engine.config import Config
from engine.errors import (
    CheckpointError,
    DeadlineError,
    MetronomeError,
    ProcessDied,
    Stopped,
    StoreError,
    TakenOver,
    TransferError,
    WeightSyncError,
    counted,
)
from engine.run.run_file import START
from engine.run.run_status import RECENT, why_ended
from engine.types import JsonObject
from tasks.attempt import count_attempt, run_folder
from tasks.stages.orchestrator_process import run_training
from tasks.terminal.console import StepLines, is_terminal, own_program, say, step_text
from tasks.tracking.artifact_cells import code_span

UPDATE_S = 10.0
"""Seconds between updates."""


class TrainingProgress:
    """Takes the lines of steps.jsonl and updates the artifact `training` of the flow run."""

    def __init__(self, config: Config) -> None:
        command = code_span(f"metronome watch {config.folder.resolve()}")
        self._where = f"\n\nIts page: {command} on {code_span(socket.gethostname())}."
        self._steps = config.train.steps
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=RECENT)
        self._shown: Mapping[str, Any] | None = None
        self._ended = threading.Event()
        context = contextvars.copy_context()  # identifies the flow run and task run of the artifacts
        self._thread = threading.Thread(target=context.run, args=(self._tell,), name="progress", daemon=True)

    def __enter__(self) -> TrainingProgress:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        if kind is None or issubclass(kind, Exception):  # a cancelled run does not wait for the server
            self._thread.join(5.0)

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Take the next line; returns at once."""
        self._rows.append(row)

    def _tell(self) -> None:
        bar = None
        first = f"Training, {counted(self._steps, 'step')}{self._where}"
        while True:
            last = self._ended.wait(UPDATE_S if bar is not None else 0.0)
            try:
                bar = bar or create_progress_artifact(0.0, key="training", description=first)
                self._update(bar)
            except httpx.HTTPError as error:
                say("warning", f"the Prefect server does not take the progress: {type(error).__name__}: {error}")
            if last:
                return

    def _update(self, bar: Any) -> None:  # noqa: ANN401
        rows = list(self._rows)
        if not rows or rows[-1] is self._shown:
            return
        share = 100.0 * (rows[-1]["step"] + 1) / self._steps
        update_progress_artifact(bar, share, description=step_text(rows, self._steps) + self._where)
        self._shown = rows[-1]


def train_shown(
    config: Config,
    resume: bool,
    replay: Path | None = None,
    also: Callable[[JsonObject], None] = lambda row: None,
) -> int:
    """Train in the run folder that this process has entered, print its steps, and return the number of steps. `also`
    gets each new line of steps.jsonl. Arguments and errors otherwise: as for `run_training`."""
    folder = run_folder(config)
    line = StepLines(config.train.steps)
    if is_terminal():
        say("watch", f"in another terminal: {own_program('metronome')} watch {folder.path}")

    def on_step(row: JsonObject) -> None:
        folder.fence.check_attempt()
        line(row)
        also(row)

    run_training(config, resume, replay, on_step=on_step)
    return config.train.steps


RETRIES = 1_000_000
"""Prefect's retries are practically unlimited. The limit is `run.resumes`, which counts attempts without progress."""
DELAY_S = 3.0
"""Seconds between a death and the restart."""

STORAGE_S = (60.0, 180.0, 420.0)
"""Additional seconds before the first, the second and each later resume in a row after a checkpoint could not be
written or read. Together they outlast a storage outage of ten minutes."""


PASSING = (ProcessDied, Stopped, DeadlineError, TransferError, CheckpointError, WeightSyncError, StoreError)
"""Errors that may be transient."""


def pause_before_resume(told: tuple[str, str] | None, starts: int) -> float:
    """Seconds to wait before a resume. `told`: name and message of the error that ended the previous attempt; `starts`:
    attempts since the last progress."""
    if told is None or told[0] != CheckpointError.__name__:
        return 0.0
    return STORAGE_S[min(max(starts, 1), len(STORAGE_S)) - 1]


def _worth_resuming(task: Any, run: Any, state: Any) -> bool:  # noqa: ANN401
    """Whether to restart the training: yes after a death, a signal or weights that were damaged in transfer; no after a
    wrong reward or wrong input. Nothing is trained on damaged weights. If they are damaged every time, the run makes no
    progress and ends."""
    return isinstance(state.result(raise_on_failure=False), PASSING)


@task(
    name="train",
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_delay_seconds=DELAY_S,
    retry_condition_fn=_worth_resuming,
)
def train(config: Config, resume: bool = False, ready: Callable[[], Config] | None = None) -> int:
    """Train from the newest published checkpoint if `resume` is set or this is a retry, else from step 0. Return the
    number of steps. `ready` is called before each attempt; it waits for the other nodes and returns the attempt's
    config.

    Raises the error that ended the run, or MetronomeError when the run is no longer resumed.
    """
    folder = run_folder(config)
    told = folder.last_failure()
    again = (task_run.run_count or 1) > 1
    why = why_ended(folder)[1] if again else START
    starts = count_attempt(folder, "training", config.run.resumes, why)
    if again:
        pause_s = pause_before_resume(told, starts)
        say("resume", f"the previous attempt ended: {why}" + (f"; waiting {pause_s:.0f} s" if pause_s else ""))
        time.sleep(pause_s)
    with TrainingProgress(config) as progress:
        try:
            return train_shown(config if ready is None else ready(), resume or again, also=progress)
        except MetronomeError as error:
            if not isinstance(error, TakenOver):  # then another flow writes the folder now
                folder.write_failure(error)  # also records a death, which the orchestrator cannot write itself
            raise
