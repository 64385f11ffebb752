"""Publish and register: the final checkpoint and the final policy go to `checkpoint.path`, and the policy to MLflow's
registry, as champion if it beats the present one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from engine.config import Config
from engine.config.inputs import Accepted
from engine.run.checkpoint_files import folder_of
from engine.run.checkpoint_store import place_of, upload_checkpoint
from engine.run.folder import RunFolder
from engine.run.progress import folder_size
from engine.run.run_inputs import check_model
from tasks.attempt import RegisteredPolicy, run_folder
from tasks.terminal.console import say
from tasks.terminal.progress_display import copied, show_progress
from tasks.tracking import tracked_run
from tasks.tracking.artifact_cells import code_span, markdown_text
from tasks.tracking.champion_alias import update_champion
from tasks.tracking.registered_policies import CHAMPION
from tasks.tracking.store import retry_while_away


@task(name="publish", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=5)
def publish(config: Config) -> str:
    """Publish the final checkpoint; returns its place.

    The place is `<checkpoint.path>/<run.name>/step-N`, or the folder in the run folder if `checkpoint.path` is empty.
    """
    folder = run_folder(config)
    checkpoint = folder_of(folder.checkpoints, config.train.steps)
    place = str(checkpoint)
    if config.checkpoint.path:
        place = f"{place_of(config)}/{checkpoint.name}"
        _copy_shown(checkpoint, folder.policy, place, folder.fence.check_attempt)
    note = "" if config.checkpoint.path else " (checkpoint.path is empty: it stays in the run folder)"
    create_markdown_artifact(f"{code_span(place)}{note}", key="checkpoint", description="The final checkpoint")
    return place


def copy_checkpoint(
    checkpoint: Path,
    policy: Path,
    place: str,
    fence: Callable[[], None] = lambda: None,
    sent: Callable[[int], None] = lambda size: None,
) -> None:
    """Copy a complete checkpoint to a folder or s3:// URL, with the policy's Hugging Face folder as its subfolder
    `policy/`.

    Raises MetronomeError naming the place; no marker is left there then. `fence` and `sent`: as in `upload_checkpoint`.
    """
    beside = {f"policy/{path.name}": path for path in sorted(policy.iterdir()) if path.is_file()}
    upload_checkpoint(checkpoint=checkpoint, place=place, beside=beside, fence=fence, sent=sent)


def _copy_shown(checkpoint: Path, policy: Path, place: str, fence: Callable[[], None]) -> None:
    sizes: list[int] = []
    whole = folder_size(checkpoint) + folder_size(policy)
    with show_progress("publish", copied("uploaded", lambda: sum(sizes), whole)):
        copy_checkpoint(checkpoint=checkpoint, policy=policy, place=place, fence=fence, sent=sizes.append)


@task(name="register", cache_policy=NO_CACHE)
def register(name: str, policy: Path, accept: Sequence[Accepted] = ()) -> RegisteredPolicy:
    """Store the policy's folder in the active MLflow run and register it with its lineage.

    A repeated call continues where the first was interrupted. `policy`: the folder `policy/` of a run folder, whose
    config and evaluations are read. `accept`: as run.accept. Raises TrackingAway, and BadInput if the base model is
    not what the run was trained from.
    """
    folder = RunFolder(policy.parent)
    config = folder.read_config()
    accepting = config.model_copy(update={"run": config.run.model_copy(update={"accept": accept})})
    check_model(folder.path, accepting, Path(config.model.path))
    what = f"registering {name}"
    version = retry_while_away(what, lambda: tracked_run.register_version(name, policy))
    verdict = retry_while_away(what, lambda: update_champion(name, version, folder, config))
    text = f"{code_span(name)} version {version} {'is now' if verdict.wins else 'is not'} `{CHAMPION}`: "
    say("register", f"{text.replace('`', '')}{verdict.reason}")
    create_markdown_artifact(
        text + markdown_text(verdict.reason), key="registered-model", description="In MLflow's registry"
    )
    return RegisteredPolicy(name, version, verdict.wins, verdict.reason)
