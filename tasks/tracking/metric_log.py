"""Logs each step to MLflow exactly once, even if processes were killed.

Steps are logged when they end, before a checkpoint covers them. A crash may lose the last ones, because logging is
asynchronous, and the steps after the checkpoint are done again. On resume, figures that are missing in MLflow are
logged from steps.jsonl. A repeated step that MLflow already has keeps its first figures. The tag
`metronome.redone_steps` names these steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import mlflow

from tasks.tracking.mlflow_run import write_queue

REDONE = "metronome.redone_steps"
"""Tag of an MLflow run: the steps whose figures are from an attempt that ended before its next checkpoint."""


class MetricLog:
    """Logs every number of each step once to an MLflow run, unless the run has it already."""

    def __init__(self, run_id: str, resumed: bool = False) -> None:
        """`resumed`: the MLflow run may have steps already. Then the whole history of its metrics is read.

        They are read from MLflow and not from steps.jsonl, which may have been cut to nothing.
        """
        self._client = mlflow.MlflowClient()
        self._run_id = run_id
        there = self._client.get_run(run_id).data.metrics if resumed else {}
        keys = [key for key in there if not key.startswith("system/")]
        self._logged = {key: {point.step for point in self._client.get_metric_history(run_id, key)} for key in keys}
        self._redone: set[int] = set()

    def __call__(self, step: int, figures: Mapping[str, float]) -> None:
        """Log a step's figures that are not in the run yet, asynchronously."""
        fresh = {name: value for name, value in figures.items() if step not in self._logged.get(name, ())}
        for name in fresh:
            self._logged.setdefault(name, set()).add(step)
        if fresh:
            write_queue().metrics(fresh, step)
        if len(fresh) < len(figures):
            self._tag(step)

    def fill(self, rows: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Log missing figures of steps that will not be done again."""
        for step, figures in rows:
            fresh = {name: value for name, value in figures.items() if step not in self._logged.get(name, ())}
            if fresh:
                self(step, fresh)

    def _tag(self, step: int) -> None:
        self._redone.add(step)
        steps = ", ".join(map(str, sorted(self._redone)))
        write_queue().do(f"the tag {REDONE}", lambda: self._client.set_tag(self._run_id, REDONE, steps))
