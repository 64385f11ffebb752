"""Where the loop's groups come from: the running instances, the same with a recorder behind, or a record of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from engine.model.tri_model import TriModel
from engine.queue.client import ControlClient
from engine.trainer.record import Recorder, Replay
from engine.types import Group
from engine.weights.transport import Publisher


class Rollouts(Protocol):
    """What the loop asks of the inference side."""

    def publish(self, models: TriModel, version: int) -> float:
        """Give every instance exactly this version of the policy; returns the exposed seconds."""

    def start(self, step: int) -> None:
        """Start the step's batch of prompts in the background."""

    def windows(self, step: int) -> Iterator[list[Group]]:
        """The step's groups in windows, each as soon as it may be trained."""


class Live:
    """Rollouts of the running instances, reached through the launcher."""

    def __init__(self, control: ControlClient, publisher: Publisher, budget: int) -> None:
        """`budget`: tokens of a window."""
        self._control = control
        self._publisher = publisher
        self._budget = budget

    def publish(self, models: TriModel, version: int) -> float:
        """Export, send, and wait until every instance holds the version."""
        return self._publisher.publish(models.export(), version)

    def start(self, step: int) -> None:
        """Tell the launcher's producer."""
        self._control.ask("start", step=step)

    def windows(self, step: int) -> Iterator[list[Group]]:
        """Lease from the sample queue."""
        return self._control.windows(step, self._budget)


class Recording:
    """Passes everything on to the live rollouts and records each window once it has been trained."""

    def __init__(self, live: Live, path: Path, start: int) -> None:
        self._recorder = Recorder(path, start)
        self._live = live
        self.publish = live.publish
        self.start = live.start

    def windows(self, step: int) -> Iterator[list[Group]]:
        """The live windows; the record is flushed when the step is complete."""
        for window in self._live.windows(step):
            yield window
            self._recorder.add(window)
        self._recorder.flush()


class Recorded:
    """A record in place of rollouts: nothing to publish, nothing to start."""

    def __init__(self, path: Path, expected: int) -> None:
        self._replay = Replay(path, expected)

    def publish(self, models: TriModel, version: int) -> float:
        """No instances: no time."""
        return 0.0

    def start(self, step: int) -> None:
        """Nothing to start."""

    def windows(self, step: int) -> Iterator[list[Group]]:
        """The step's windows in the order in which they were trained."""
        return self._replay.windows(step)
