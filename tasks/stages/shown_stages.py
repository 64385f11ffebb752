"""Trains or evaluates for a task or a command, and shows the progress on the console."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.config import Config
from engine.orchestrator import standalone_evaluation as evaluation
from engine.orchestrator.run_events import RunEvents
from engine.run.folder import RunFolder
from engine.run.served_model import in_use
from engine.types import JsonObject
from tasks.attempt import run_folder
from tasks.stages.orchestrator_process import run_training
from tasks.terminal.console import StepLines, is_terminal, own_program, say
from tasks.terminal.progress_display import show_progress
from tasks.tracking.evaluations import InRun


def train_shown(
    config: Config,
    resume: bool,
    replay: Path | None = None,
    also: Callable[[JsonObject], None] = lambda row: None,
) -> int:
    """Train in the run folder that this process has entered, print its steps and its evaluations, and return the number
    of steps. `also` gets each new line of steps.jsonl. Arguments and errors otherwise: as for `run_training`."""
    folder = run_folder(config)
    line = StepLines(config.train.steps)
    evaluated = InRun(folder)
    if is_terminal():
        say("watch", f"in another terminal: {own_program('metronome')} watch {folder.path}")

    def on_step(row: JsonObject) -> None:
        folder.fence.check_attempt()
        line(row)
        also(row)
        evaluated()

    run_training(config, resume, replay, on_step=on_step)
    return config.train.steps


def evaluate_shown(
    config: Config, model: Path, weight_version: int, folder: RunFolder, meeting: Path | None = None
) -> list[JsonObject]:
    """Evaluate a model folder. Arguments, result and errors are those of
    `engine.orchestrator.standalone_evaluation.evaluate_model`."""
    instances = config.rollout.instances if meeting is not None else max(1, config.rollout.instances)
    progress = evaluation.EvaluationProgress(instances, notices=RunEvents(say, trained=False))
    with in_use(model), show_progress("evaluate", progress.progress):
        return evaluation.evaluate_model(
            config=config,
            model=model,
            weight_version=weight_version,
            folder=folder,
            meeting=meeting,
            progress=progress,
        )
