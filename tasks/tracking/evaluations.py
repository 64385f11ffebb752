"""Logs the evaluations of a run folder in MLflow when they are done."""

from __future__ import annotations

from collections.abc import Mapping

import mlflow

from engine.config import Config
from engine.run.folder import RunFolder
from engine.run.lock import is_held
from tasks.terminal.console import print_error
from tasks.tracking import tracked_run
from tasks.tracking.mirror import Mirror
from tasks.tracking.others import CLOSE_S, OtherTrackers
from tasks.tracking.run_page import draw_at_end
from tasks.tracking.store import TrackingAway, retry_while_away


def log_finished(config: Config, tags: Mapping[str, str] = tracked_run.NO_TAGS) -> str:
    """Draw the run's page anew, unless the run goes on, and log the evaluations of the run folder in its MLflow run,
    whose status and settings stay; return the run's id.

    Waits for MLflow, and as long for its artifact store (tasks.tracking.store). With a shorter wait, a flow run would
    be resumed so often that it is ended (tasks.cluster.watchdog). Raises TrackingAway if either stays away for longer.
    No row is lost then, because the next log in this run folder writes it.
    """
    folder = RunFolder(config.folder)
    if not is_held(folder.lock):
        draw_at_end(folder)
    what = f"logging all evaluations of run {config.run.name}"
    known = tracked_run.find_run(config, waits=True)
    if known is None:
        known = tracked_run.create_run(config).info.run_id
        mlflow.end_run()
    run = retry_while_away(what, lambda: mlflow.MlflowClient().get_run(known))
    others = OtherTrackers(config)
    try:
        retry_while_away(what, Mirror(run, config, tags, trains=False, also=others.log).push)
    finally:
        others.close(CLOSE_S)
    return str(known)


def log_or_say(config: Config) -> None:
    """`log_finished` for a command. Since the evaluation is already done, an MLflow that does not answer is only a
    warning."""
    try:
        log_finished(config)
    except TrackingAway as error:
        print_error(
            f"warning: {error}. The figures are in {RunFolder(config.folder).evaluations}; the next evaluation or "
            "resume of this run logs them"
        )
