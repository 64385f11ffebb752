"""Progress of the training in the Prefect UI: a progress bar, and a page with step, reward, speed and time left.

A thread of its own sends it, every 10 s. So a server that is slow or does not answer delays neither training nor
MLflow.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import httpx
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact

from engine.config import Config
from engine.run.checkpoint_files import latest
from engine.run.folder import RunFolder
from tasks.console import duration, say

UPDATE_S = 10.0
"""Seconds between updates. Each is two requests to the Prefect server."""
END_S = 5.0
"""Time limit of the last update when training ends."""


class Progress:
    """Takes the lines of steps.jsonl and updates the artifacts `training` and `training-status` of the flow run."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=20)
        self._shown: Mapping[str, Any] | None = None
        self._ended = threading.Event()
        context = contextvars.copy_context()  # says which flow and task run the artifacts belong to
        self._thread = threading.Thread(target=context.run, args=(self._tell,), name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if kind is None or issubclass(kind, Exception):  # a cancelled run does not wait for the server
            self._thread.join(END_S)

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Take the next line; returns at once."""
        self._rows.append(row)

    def _tell(self) -> None:
        bar = None
        steps = self._config.train.steps
        while True:
            last = self._ended.wait(UPDATE_S if bar is not None else 0.0)
            try:
                bar = bar or create_progress_artifact(0.0, key="training", description=f"Training, {steps} steps")
                self._update(bar)
            except httpx.HTTPError as error:
                say("warning", f"the Prefect server does not take the progress: {type(error).__name__}: {error}")
            if last:
                return

    def _update(self, bar: Any) -> None:  # noqa: ANN401
        rows = list(self._rows)
        if not rows or rows[-1] is self._shown:
            return
        update_progress_artifact(bar, 100.0 * (rows[-1]["step"] + 1) / self._config.train.steps)
        create_markdown_artifact(page(self._config, rows), key="training-status", description="How far training is")
        self._shown = rows[-1]


def page(config: Config, rows: list[Mapping[str, Any]]) -> str:
    """A Markdown table of the last of some lines of steps.jsonl. The time left uses the mean step time of the lines."""
    row = rows[-1]
    done = rows[-1]["step"] + 1
    steps = config.train.steps
    left = (steps - done) * sum(line["step_s"] for line in rows) / len(rows)
    checkpoint = latest(RunFolder(config.folder).checkpoints)
    cells = {
        "run": config.run.name,
        "steps": f"{done} of {steps} ({100 * done / steps:.1f} %)",
        "reward (last step)": f"{row['reward_mean']:.3f}",
        f"reward (mean of {len(rows)} steps)": f"{sum(line['reward_mean'] for line in rows) / len(rows):.3f}",
        "response length": f"{row['response_length_mean']:.0f} tokens",
        "speed": f"{row['tokens_per_s_per_device']:,.0f} tokens/s/device",
        "time of a step": f"{row['step_s']:.1f} s",
        "time left": duration(left),
        "last checkpoint": checkpoint.name if checkpoint is not None else "none yet",
        "as of": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells.items())])
