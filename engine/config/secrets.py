"""Passwords in addresses: a recipe has none, because it is written to the run folder, to MLflow and to checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config.tree import Tree
from engine.errors import has_password, without_password

INSTEAD = {
    "tracking.uri": "set MLflow's user and password in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or a "
    "whole URI (for example of a database) in MLFLOW_TRACKING_URI",
}
"""What to use instead, by key."""
ELSEWHERE = "set keys in the environment, for example AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or in ~/.aws"


def check_no_password(config: Tree) -> None:
    """Raise ValueError that names the first key with a password in its address, and what to use instead."""
    for key, text in _addresses(config):
        if has_password(text):
            raise ValueError(
                f"{key} = {without_password(text)!r} (shown without its password): a recipe is written to the run "
                f"folder, to MLflow and to checkpoints, so it must not contain one; {INSTEAD.get(key, ELSEWHERE)}"
            )


def _addresses(config: Tree) -> Iterator[tuple[str, str]]:
    yield "tracking.uri", config.tracking.uri
    yield "checkpoint.path", config.checkpoint.path
    yield "model.path", config.model.path
    for one in config.data.sets:
        yield "data.train", one.path
    yield "data.heldout", config.data.heldout
    for path in config.data.decontaminate:
        yield "data.decontaminate", path
    for path in config.evaluate.benchmarks:
        yield "evaluate.benchmark", path
    yield "evaluate.folder", config.evaluate.folder
