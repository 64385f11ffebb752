"""Training and evaluation in this process, without Prefect: `metronome train` and `metronome evaluate`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from engine.config import Config
from engine.data.prepared import Prepared
from engine.data.problem_statistics import record_data
from engine.run.folder import RunFolder
from engine.run.identity import claim_run
from engine.run.lock import hold_lock
from engine.run.run_file import START, update_run
from engine.run.served_model import weight_version
from tasks.attempt import TRAIN, EnteredRun, Stages, evaluation_failure, read_progress, write_fenced
from tasks.cluster.other_nodes import evaluation_nodes
from tasks.cluster.ray.placement import running_on_ray
from tasks.stages import summary
from tasks.stages.evaluate import evaluate_shown
from tasks.stages.train import train_shown
from tasks.terminal import console
from tasks.tracking import evaluation_texts, evaluations, registered_policies, tracked_run


def train_here(config: Config, resume: bool, replay: Path | None, recipe: str, data: Prepared | None = None) -> None:
    """Train, tracked in MLflow, and print the table at the end. `replay`: the record to train on, if any. `data`: the
    problem sets, for the run folder."""
    folder = RunFolder(config.folder)
    # the lock comes before MLflow: a living process may be using the MLflow run
    with (
        hold_lock(folder.lock, f"run folder {folder.path}", 0.0) as lock,
        write_fenced(folder, lock),
        _begun(config, folder, resume),
        tracked_run.track_run(config),
    ):
        update_run(folder.path, start=registered_policies.started_from(config, recipe, "base")[1])
        if data is not None:
            record_data(config, data)

        def train(config: Config) -> int:
            if config.cluster.engine != "ray" or replay is not None:
                return train_shown(config, resume, replay)
            with running_on_ray(config, folder.path) as placed:
                return train_shown(placed.config, resume)

        run = EnteredRun(config, train, Stages(folder))
        replace(TRAIN, is_stored=False).run(run)
    console.print_table(f"Run {config.run.name}", summary.outcome_rows(config, {}))


@contextmanager
def _begun(config: Config, folder: RunFolder, resume: bool) -> Iterator[None]:
    claim_run(config, resume)
    folder.fence.begin_attempt("training", "resumed by a person" if resume else START, read_progress(folder), True)
    yield


def evaluate_here(config: Config) -> None:
    """Evaluate model.path, print the figures, and log them in MLflow."""
    folder = RunFolder(config.folder)
    model = Path(config.model.path)
    tracked_run.check_store(config)
    if not folder.config.exists():
        folder.create(config, resume=False)
    meeting = folder.path / "evaluations" / f"instances-{os.getpid()}"
    with (
        evaluation_failure(folder),
        console.print_stage("evaluate") as say,
        evaluation_nodes(config, model, 0, meeting) as (there, place),
    ):
        found = evaluate_shown(
            config=there, model=model, weight_version=weight_version(model), folder=folder, meeting=place
        )
        say(evaluation_texts.describe_evaluations(found))
    console.say("evaluate", f"of {config.model.path}; brackets: 95 % interval")
    console.say("evaluate", f"the figures are in {folder.evaluations}, each response in {folder.path}/evaluations/")
    evaluations.log_or_say(config)
