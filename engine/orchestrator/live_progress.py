"""How far a training is, in words, as the console and the page of a run show it between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import counted
from engine.orchestrator.server import Server
from engine.run.progress import Progress
from engine.types import JsonObject


def live_progress(server: Server, steps: int) -> Progress:
    """The progress of a training of `steps` steps now. `server`: has the pool and the plane as soon as they are
    there."""
    found: JsonObject = {"ready": False}
    if (pool := server.pool) is not None:
        loads = [one.load for one in pool.instances if one.load is not None]
        found |= {
            "instances": len(pool.processes.declared),
            "met": sum(one.met for one in pool.instances),
            "running": sum(load.running for load in loads),
            "tokens_per_s": round(sum(one.tokens_per_s for one in pool.instances)),
        }
    if server.plane is not None:
        found |= server.plane.stage_progress()
    return training_progress(found, steps)


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
