"""An evaluation in this process, which is shown while it goes on."""

from __future__ import annotations

from pathlib import Path

from engine.config import Config
from engine.launcher import standalone_evaluation as evaluation
from engine.launcher.evaluation_progress import EvaluationProgress
from engine.launcher.notices import Notices
from engine.run.folder import RunFolder
from engine.types import JsonObject
from tasks import how_far
from tasks.console import say
from tasks.live import showing


def evaluate_shown(
    config: Config, model: Path, weight_version: int, folder: RunFolder, meeting: Path | None = None
) -> list[JsonObject]:
    """Evaluate a model folder, with the arguments, the result and the errors of
    `engine.launcher.standalone_evaluation.evaluate_model`."""
    progress = EvaluationProgress(notices=Notices(say, trained=False))
    instances = config.rollout.instances if meeting is not None else max(1, config.rollout.instances)
    with showing("evaluate", how_far.evaluation(progress, instances)):
        return evaluation.evaluate_model(
            config=config,
            model=model,
            weight_version=weight_version,
            folder=folder,
            meeting=meeting,
            progress=progress,
        )
