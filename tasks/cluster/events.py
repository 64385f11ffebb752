"""Events to which automations react."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefect.events import emit_event
from prefect.runtime import flow_run

from tasks.terminal.console import named_deployment

TRAINED = "metronome.training.finished"
"""A policy is trained and published."""
FINISHED = "metronome.run.finished"
"""All stages of a run are done."""
CHAMPION = "metronome.champion.replaced"
"""A run's policy became champion."""


def training_finished(recipe: str, run: str, policy: Path, overrides: Sequence[str], pool_instances: int) -> None:
    """Emit the event that triggers the deployment `evaluate`, which reads its parameters from the payload."""
    emit_event(
        TRAINED,
        resource={
            "prefect.resource.id": f"metronome.run.{run}",
            "prefect.resource.name": run,
            "metronome.evaluation": named_deployment("evaluate"),
        },
        payload={
            "recipe": recipe,
            "run": run,
            "policy": str(policy.resolve()),
            "overrides": list(overrides),
            "on_rollout_pool": pool_instances,
        },
    )


def run_finished(folder: Path, figures: str, champion: str = "") -> None:
    """Emit the events of which alerts tell. `folder`: that of the run. `figures`: what the run reached, in a line.
    `champion`: the run's registered policy if it became champion."""
    run = folder.name
    resource = {"prefect.resource.id": f"metronome.run.{run}", "prefect.resource.name": run}
    payload = {
        "run": run,
        "folder": str(folder.resolve()),
        "figures": figures,
        "flow_run": str(flow_run.id),
        "policy": champion,
    }
    for event in (FINISHED, CHAMPION) if champion else (FINISHED,):
        emit_event(event, resource=resource, payload=payload)
