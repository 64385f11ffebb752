"""Register: the trained policy as a version of a model in MLflow's registry."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from tasks import tracking


@task(name="register", cache_policy=NO_CACHE)  # no retry: a second try could make a second version
def register(name: str, policy: Path) -> str:
    """Store the policy's folder with the active MLflow run and register it; returns the version."""
    version = tracking.register(name, policy)
    create_markdown_artifact(f"`{name}` version {version}", key="registered-model", description="In MLflow's registry")
    return version
