"""Train: runs the launcher, sends its steps to the console, MLflow and Prefect, and starts it again if it dies."""

from __future__ import annotations

import time
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from engine.config import Config
from engine.errors import (
    CheckpointError,
    DeadlineError,
    MetronomeError,
    ProcessDied,
    Stopped,
    TakenOver,
    TransferError,
    WeightSyncError,
)
from engine.types import JsonObject
from tasks.console import StepLines, say
from tasks.fenced import run_folder
from tasks.finished_stages import count_attempt, last_end
from tasks.launcher_process import run_training
from tasks.progress import Progress
from tasks.tracking.evaluations import InRun

RETRIES = 1_000_000
"""Prefect's retries are practically unlimited. The limit is `run.resumes`, which counts attempts without progress."""
DELAY_S = 3.0
"""Seconds between a death and the next start."""

STORAGE_S = (60.0, 180.0, 420.0)
"""Further seconds before the first, the second and each later resume in a row after a checkpoint could not be written
or read: together they outlast a storage outage of ten minutes."""


PASSING = (ProcessDied, Stopped, DeadlineError, TransferError, CheckpointError, WeightSyncError)
"""Errors that need not occur again."""


def pause(told: tuple[str, str] | None, starts: int) -> float:
    """Seconds to wait before a resume. `told`: name and message of the error that ended the attempt before; `starts`:
    attempts since the last progress."""
    if told is None or told[0] != CheckpointError.__name__:
        return 0.0
    return STORAGE_S[min(max(starts, 1), len(STORAGE_S)) - 1]


def _worth_resuming(task: Any, run: Any, state: Any) -> bool:  # noqa: ANN401
    """Whether the training is started again: yes after a death, a signal or weights that were damaged on their way, no
    after a wrong reward or wrong input. Nothing was trained on damaged weights; where they are wrong each time the run
    gets no further, and ends."""
    return isinstance(state.result(raise_on_failure=False), PASSING)


@task(
    name="train",
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_delay_seconds=DELAY_S,
    retry_condition_fn=_worth_resuming,
)
def train(config: Config, resume: bool = False) -> int:
    """Train, from the newest published checkpoint if `resume` or when tried again, else from step 0; the number of
    steps.

    Raises what ended the run; MetronomeError when it is not resumed any more.
    """
    folder = run_folder(config)
    told = folder.last_failure()
    line = StepLines(config.train.steps)
    again = (task_run.run_count or 1) > 1
    why = last_end(folder) if again else "the start of the flow"
    starts = count_attempt(folder, "training", config.run.resumes, why)
    if again:
        pause_s = pause(told, starts)
        say("resume", f"the attempt before ended: {why}" + (f"; waiting {pause_s:.0f} s" if pause_s else ""))
        time.sleep(pause_s)
    evaluated = InRun(folder)
    with Progress(config) as progress:

        def on_step(row: JsonObject) -> None:
            folder.fence.check()
            line(row)
            progress(row)
            evaluated()

        try:
            run_training(config, resume or again, on_step=on_step)
        except TakenOver:
            raise  # the folder is another's now
        except MetronomeError as error:
            folder.fail(error)  # also what the launcher could not write: how it died
            raise
    return config.train.steps
