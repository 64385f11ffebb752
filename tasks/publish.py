"""Publish: the final checkpoint and policy copied to a folder or s3://, marker last; readers trust only the marker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import botocore.exceptions
import fsspec
from fsspec.implementations.local import LocalFileSystem
from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from engine.config import Config
from engine.errors import MetronomeError
from engine.run_folder import RunFolder

MARKER = "_SUCCESS.json"


@task(name="publish", cache_policy=NO_CACHE, retries=2, retry_delay_seconds=5)
def publish(config: Config) -> str:
    """Where the final checkpoint lies: `<checkpoint.path>/<run.name>/step-N`, or the run folder if the key is empty."""
    folder = RunFolder(config.folder)
    checkpoint = folder.checkpoints / f"step-{config.train.steps:06d}"
    place = str(checkpoint)
    if config.checkpoint.path:
        place = f"{config.checkpoint.path.rstrip('/')}/{config.run.name}/{checkpoint.name}"
        copy_checkpoint(checkpoint, folder.policy, place)
    note = "" if config.checkpoint.path else " (checkpoint.path is empty: it stays in the run folder)"
    create_markdown_artifact(f"`{place}`{note}", key="checkpoint", description="The final checkpoint")
    return place


def copy_checkpoint(checkpoint: Path, policy: Path, place: str) -> None:
    """Copy a complete checkpoint, with the policy's Hugging Face folder as `policy/` in it, to a folder or s3:// URL.

    A marker that is there already is removed first. Raises MetronomeError naming the place; no marker is left then.
    """
    marker = _marker(checkpoint)
    files = {name: checkpoint / name for name in marker["files"]}
    files |= {f"policy/{path.name}": path for path in sorted(policy.iterdir()) if path.is_file()}
    try:
        store, root = fsspec.core.url_to_fs(place)
        if isinstance(store, LocalFileSystem):
            store.auto_mkdir = True
        if store.exists(f"{root}/{MARKER}"):
            store.rm_file(f"{root}/{MARKER}")
        for name, file in files.items():
            store.put_file(str(file), f"{root}/{name}")
        sizes = {name: file.stat().st_size for name, file in files.items()}
        store.pipe_file(f"{root}/{MARKER}", json.dumps({**marker, "files": sizes}, indent=1).encode())
    except (OSError, botocore.exceptions.BotoCoreError) as error:
        raise MetronomeError(f"publishing the checkpoint to {place} (checkpoint.path) failed: {error}") from error


def _marker(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / MARKER
    if not path.is_file():
        raise MetronomeError(f"checkpoint {checkpoint} is not complete: it has no {MARKER}")
    marker: dict[str, Any] = json.loads(path.read_text())
    return marker
