"""How far a training is, in words, as the console and the page of a run show it between two steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import counted
from engine.orchestrator.server import Server
from engine.run.checkpoint_files import partial_of
from engine.run.progress import Progress, folder_size, format_size
from engine.types import JsonObject

YOUNG_S = 30.0
"""An incomplete checkpoint to which nothing was written for this many seconds is not being fetched."""


class LiveProgress:
    """Looks at the parts of a run, as soon as they are there."""

    def __init__(self, server: Server, checkpoints: Path, steps: int) -> None:
        """`server`: has the pool and the plane; `steps`: the run's number of steps (train.steps)."""
        self._server = server
        self._checkpoints = checkpoints
        self._steps = steps
        self._left_over = arriving_size(checkpoints)
        """Bytes of a checkpoint that an interrupted run did not finish. If they change, one is being fetched."""

    def look(self) -> Progress:
        """Return the progress now."""
        found: JsonObject = {"ready": False}
        if (pool := self._server.pool) is not None:
            loads = [one.load for one in pool.instances if one.load is not None]
            found |= {
                "instances": len(pool.processes.declared),
                "met": sum(one.met for one in pool.instances),
                "running": sum(load.running for load in loads),
                "tokens_per_s": round(sum(one.tokens_per_s for one in pool.instances)),
            }
        if self._server.plane is not None:
            found |= self._server.plane.stage_progress()
        size = 0 if found["ready"] else arriving_size(self._checkpoints)
        if size and size != self._left_over:
            return Progress(f"fetching a checkpoint: {format_size(size)} so far")
        return training_progress(found, self._steps)


def training_progress(found: Mapping[str, Any], steps: int) -> Progress:
    """The progress of a training of `steps` steps. `found`: counts of the pool, if it has started, and those of
    `Plane.stage_progress`."""
    if not found["ready"]:
        waits = "starting"
        if "met" in found:
            met = found["met"]
            of = found["instances"]
            waits = f"{met:,} of {counted(of, 'instance')} ready" if of else f"joined: {counted(met, 'instance')}"
        return Progress(f"loading the models; {waits}", None)
    if "step" not in found and found.get("done") == steps:
        return Progress("the last checkpoint and the policy are written", 1.0)
    if "step" not in found:
        none = found.get("met") == 0
        return Progress("waiting for an instance" if none else "weights are on their way to the instances", None)
    step = found["step"]
    expected = found["expected"]
    done = f"{step:,}/{counted(steps, 'step')}"
    groups = counted(expected, "group")
    text = f"{done}; in the next: {found['trained']:,} of {groups} trained"
    if not found["arrived"]:
        text = (
            f"{done}; in the next: waiting for the first of {groups}; "
            f"{found.get('running', 0):,} in flight, {found.get('tokens_per_s', 0):,} tokens/s"
        )
    elif found["trained"] < found["arrived"] or found["arrived"] < expected:
        text += f", {found['arrived']:,} sampled"
    if (under_way := found.get("evaluation")) is not None:
        text += (
            f"; evaluating version {under_way['version']}: {under_way['finished']:,} of {under_way['expected']:,} "
            "responses"
        )
    return Progress(text, (step + found["trained"] / expected) / steps)


def arriving_size(checkpoints: Path) -> int:
    """Bytes of the checkpoint that is being copied here now; 0 if there is none."""
    pattern = partial_of(checkpoints / "step-*").name
    young = time.time() - YOUNG_S
    return sum(folder_size(one) for one in checkpoints.glob(pattern) if _newest(one) > young)


def _newest(folder: Path) -> float:
    times = [0.0]
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times)
