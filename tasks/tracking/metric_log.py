"""Which steps an MLflow run has, so that no step is logged twice and none is left out, whatever was killed.

Steps are logged as they end, before a checkpoint covers them. A crash may lose the last ones (logging is asynchronous),
and the steps after the checkpoint are done again: on resume what MLflow lacks is logged from steps.jsonl, and a redone
step that it has keeps the figures it got first. The tag `metronome.redone_steps` says which those are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import mlflow

from tasks.tracking.mlflow_run import write_queue

REDONE = "metronome.redone_steps"
"""Tag of an MLflow run: steps whose figures are those of an attempt that was cut off before its next checkpoint."""


class MetricLog:
    """Logs every number of each step once to an MLflow run, beside what is in it already."""

    def __init__(self, run_id: str, resumed: bool = False) -> None:
        """`resumed`: the run may have steps already; reads the whole history of its metrics.

        Which these are, the run says itself: steps.jsonl may have been cut to nothing.
        """
        self._client = mlflow.MlflowClient()
        self._run_id = run_id
        there = self._client.get_run(run_id).data.metrics if resumed else {}
        keys = [key for key in there if not key.startswith("system/")]
        self._logged = {key: {point.step for point in self._client.get_metric_history(run_id, key)} for key in keys}
        self._redone: set[int] = set()

    def __call__(self, step: int, figures: Mapping[str, float]) -> None:
        """Log a step's figures that are not in the run; asynchronously."""
        fresh = {name: value for name, value in figures.items() if step not in self._logged.get(name, ())}
        for name in fresh:
            self._logged.setdefault(name, set()).add(step)
        if fresh:
            write_queue().metrics(fresh, step)
        if len(fresh) < len(figures):
            self._tag(step)

    def fill(self, rows: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Log what is lacking of steps that will not be done again."""
        for step, figures in rows:
            fresh = {name: value for name, value in figures.items() if step not in self._logged.get(name, ())}
            if fresh:
                self(step, fresh)

    def _tag(self, step: int) -> None:
        self._redone.add(step)
        steps = ", ".join(map(str, sorted(self._redone)))
        write_queue().do(f"the tag {REDONE}", lambda: self._client.set_tag(self._run_id, REDONE, steps))
