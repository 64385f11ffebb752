"""Evaluates in this process and shows the progress."""

from __future__ import annotations

from pathlib import Path

from engine.config import Config
from engine.orchestrator import standalone_evaluation as evaluation
from engine.orchestrator.evaluation_progress import EvaluationProgress
from engine.orchestrator.run_events import RunEvents
from engine.run.folder import RunFolder
from engine.types import JsonObject
from tasks import stage_progress
from tasks.console import say
from tasks.progress_display import show_progress


def evaluate_shown(
    config: Config, model: Path, weight_version: int, folder: RunFolder, meeting: Path | None = None
) -> list[JsonObject]:
    """Evaluate a model folder. Arguments, result and errors are those of
    `engine.orchestrator.standalone_evaluation.evaluate_model`."""
    progress = EvaluationProgress(notices=RunEvents(say, trained=False))
    instances = config.rollout.instances if meeting is not None else max(1, config.rollout.instances)
    with show_progress("evaluate", stage_progress.evaluation(progress, instances)):
        return evaluation.evaluate_model(
            config=config,
            model=model,
            weight_version=weight_version,
            folder=folder,
            meeting=meeting,
            progress=progress,
        )
