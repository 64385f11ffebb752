"""What the flow shows of a run between two lines of steps.jsonl: the progress of the step, and lines for the user.

Both are files in the log folder. They show that the run is going on, and nothing depends on them: a full disk that
can't take them does not end the run.
"""

from __future__ import annotations

import time

from engine.orchestrator.plane import Plane
from engine.orchestrator.pool.pool import Pool
from engine.orchestrator.run_events import RunEvents
from engine.run.files import append_line, write_unsynced
from engine.run.folder import RunFolder
from engine.types import JsonObject


class LiveProgress:
    """Writes both files of a run folder. `pool` and `plane` are set as soon as they exist."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._written: JsonObject = {}
        self.notices = RunEvents(self._append)
        self.pool: Pool | None = None
        self.plane: Plane | None = None

    def write_progress(self) -> None:
        """Write the progress of the step if it has changed, and the notices that are due."""
        self.notices.report_due()
        found = self._how_far()
        if found == self._written or self._folder.fence.is_passed:
            return
        try:
            write_unsynced(self._folder.progress, found)
        except OSError as error:
            print(f"{self._folder.progress} can't be written: {error}", flush=True)
        self._written = found

    def close(self) -> None:
        """Write the remaining notices, and delete the progress file, since no step is in progress."""
        self.notices.close()
        if not self._folder.fence.is_passed:
            self._folder.progress.unlink(missing_ok=True)

    def _how_far(self) -> JsonObject:
        found: JsonObject = {"ready": False}
        if self.pool is not None:
            loads = [one.load for one in self.pool.instances if one.load is not None]
            found |= {
                "instances": len(self.pool.processes.declared),
                "met": sum(one.met for one in self.pool.instances),
                "running": sum(load.running for load in loads),
                "tokens_per_s": round(sum(one.tokens_per_s for one in self.pool.instances)),
            }
        return found if self.plane is None else found | self.plane.stage_progress()

    def _append(self, stage: str, text: str) -> None:
        print(f"{stage}: {text}", flush=True)
        if self._folder.fence.is_passed:
            return
        try:
            append_line(self._folder.notices, {"stage": stage, "text": text, "at": time.time()})
        except OSError as error:
            print(f"{self._folder.notices} can't be written: {error}", flush=True)
