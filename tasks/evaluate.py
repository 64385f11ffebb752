"""Evaluate: accuracy of a model folder on the benchmark, with its interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from engine import evaluation
from engine.config import Config
from engine.errors import DeadlineError, ProcessDied
from engine.run_folder import RunFolder
from tasks import tracking


def _worth_retrying(task: Any, run: Any, state: Any) -> bool:  # noqa: ANN401
    """An instance that died may live the second time; wrong input stays wrong."""
    return isinstance(state.result(raise_on_failure=False), ProcessDied | DeadlineError)


@task(name="evaluate", cache_policy=NO_CACHE, retries=1, retry_condition_fn=_worth_retrying)
def evaluate(config: Config, model: Path, weight_version: int) -> dict[str, Any]:
    """The new row of evaluations.jsonl."""
    row = evaluation.evaluate(config, model, weight_version, RunFolder(config.folder))
    tracking.log_evaluation(row)
    cells = [{"figure": name, "value": str(value)} for name, value in row.items()]
    create_table_artifact(cells, key="evaluation", description=f"Weight version {weight_version}")
    return row
