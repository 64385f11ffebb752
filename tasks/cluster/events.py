"""Events to which automations react."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefect.events import emit_event

from tasks.console import named_deployment

TRAINED = "metronome.training.finished"
"""A policy is trained and published."""


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
