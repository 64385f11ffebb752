"""Register: adds the trained policy to MLflow's registry, as champion if it beats the present champion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from engine.config.inputs import Accepted
from engine.run.folder import RunFolder
from engine.run.run_inputs import check_registered
from tasks.attempt import RegisteredPolicy
from tasks.terminal.console import say
from tasks.tracking import tracked_run
from tasks.tracking.artifact_cells import code_span, markdown_text
from tasks.tracking.champion_alias import update_champion
from tasks.tracking.registered_policies import CHAMPION
from tasks.tracking.retry import retry_while_away


@task(name="register", cache_policy=NO_CACHE)
def register(name: str, policy: Path, accept: Sequence[Accepted] = ()) -> RegisteredPolicy:
    """Store the policy's folder in the active MLflow run and register it with its lineage.

    A repeated call continues where the first was interrupted. `policy`: the folder `policy/` of a run folder, whose
    config and evaluations are read. `accept`: as run.accept. Raises TrackingAway, and BadInput if the base model or the
    user's code is not what the run was trained with.
    """
    folder = RunFolder(policy.parent)
    config = folder.read_config()
    check_registered(folder.path, config.model_copy(update={"run": config.run.model_copy(update={"accept": accept})}))
    what = f"registering {name}"
    version = retry_while_away(what, lambda: tracked_run.register_version(name, policy))
    verdict = retry_while_away(what, lambda: update_champion(name, version, folder, config))
    text = f"{code_span(name)} version {version} {'is now' if verdict.wins else 'is not'} `{CHAMPION}`: "
    say("register", f"{text.replace('`', '')}{verdict.reason}")
    create_markdown_artifact(
        text + markdown_text(verdict.reason), key="registered-model", description="In MLflow's registry"
    )
    return RegisteredPolicy(name, version, verdict.wins, verdict.reason)
