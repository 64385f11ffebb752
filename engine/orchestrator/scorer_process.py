"""The ranks of a scorer as the orchestrator sees them: started, watched, and restarted when they die or hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from engine.config import Config
from engine.config.stages import REFERENCE_STAGE
from engine.errors import BadInput, ProcessDied
from engine.model.shape import check_content
from engine.orchestrator.plane import Plane
from engine.orchestrator.server import Server
from engine.orchestrator.stages import scorer_log
from engine.run.commands import scorer_command, scorer_environment
from engine.run.folder import RunFolder
from engine.run.process import Child
from engine.run.run_file import read_run

END_S = 5.0
"""Seconds that the agent (engine.trainer.ranks.agent) may take to end its ranks before it is killed."""


class ScorerProcess:
    """The elastic agent of a stage's ranks. What the ranks held when they ended is given to their successors."""

    def __init__(self, stage: str, restarts: int, start: Callable[[], Child], check: Callable[[], None]) -> None:
        """`restarts`: how often the ranks are restarted without progress in between before the run fails. `check`:
        raises BadInput if new ranks would load another model."""
        self.stage = stage
        self._restarts = restarts
        self._start = start
        self._check = check
        self.child = start()
        self._failures = 0
        """Number of times in a row that the ranks ended without progress in between."""
        self._written = 0
        """How often the stage had written columns when the ranks last ended."""

    async def check_ranks(self, plane: Plane) -> None:
        """Restart the ranks if they have died or hang. Fail the run if this has happened too often. A run that ends by
        itself ends its scorers."""
        if plane.failure is not None or plane.is_over:
            return
        hangs = plane.leases.hanging(self.stage, time.monotonic()) if self.child.alive else ""
        if self.child.alive and not hangs:
            return
        await asyncio.to_thread(self.child.stop, END_S)
        why = f"were killed, because {hangs}" if hangs else "ended"
        written = plane.leases.written(self.stage)
        self._failures = 1 if written > self._written else self._failures + 1
        self._written = written
        if self._failures > self._restarts:
            often = f"the {self._failures} starts of its ranks" if self._failures > 1 else "the start of its ranks"
            await plane.stop_run(
                ProcessDied(
                    f"the stage {self.stage!r} has made no progress in {often} (stages.{self.stage}.restarts = "
                    f"{self._restarts}); the last ones {why}; the agent {self.child.how_it_ended()}"
                )
            )
            return
        try:
            await asyncio.to_thread(self._check)
        except BadInput as changed:
            await plane.stop_run(BadInput(f"the stage {self.stage!r} is not started again: {changed}"))
            return
        plane.leases.give_again(self.stage)
        self.child = self._start()


def start_scorers(config: Config, folder: RunFolder, server: Server) -> list[ScorerProcess]:
    """Start the stages whose ranks are ours: the reference, if it has its own devices."""
    if (stage := config.reference_stage) is None:
        return []
    start = partial(_start, config=config, folder=folder, server=server, stage=REFERENCE_STAGE)
    weights = read_run(folder.path).inputs["weights"]["hash"]
    check = partial(check_content, Path(config.model.path), weights)
    return [ScorerProcess(REFERENCE_STAGE, stage.restarts, start, check)]


def _start(config: Config, folder: RunFolder, server: Server, stage: str) -> Child:
    command = scorer_command(config, stage, folder.path, server.url)
    env = scorer_environment(config, stage) | server.environment
    return Child(f"scorer of the stage {stage!r}", command, scorer_log(folder.logs, stage), env)
