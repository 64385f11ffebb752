"""Passwords in addresses: a recipe has none, because it is written to the run folder, to MLflow and to checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator

from engine.config.tree import Tree

USER_INFO = re.compile(r"(?<=://)(?P<user>[^/?#@:]*):(?P<password>[^/?#]*)@")
"""user:password@ of a URI. A password may have an @ of its own, as some write it."""
QUERY = re.compile(r"(?<=[?&])(password|passwd|token|secret)=[^&#]+", re.IGNORECASE)
"""The same among the parameters of a URI."""
INSTEAD = {
    "tracking.uri": "set MLflow's user and password in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or a "
    "whole URI (for example of a database) in MLFLOW_TRACKING_URI",
}
"""What to use instead, by key."""
ELSEWHERE = "set keys in the environment, for example AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or in ~/.aws"


def has_password(uri: str) -> bool:
    """Whether an address carries a password."""
    return "://" in uri and bool(USER_INFO.search(uri) or QUERY.search(uri))


def without_password(uri: str) -> str:
    """The address without a password and its user; as it is if it has none."""
    return QUERY.sub(r"\1=***", USER_INFO.sub("", uri)) if has_password(uri) else uri


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
    yield "data.train", config.data.train
    yield "data.heldout", config.data.heldout
    for one in config.data.decontaminate:
        yield "data.decontaminate", one
    for one in config.evaluate.benchmarks:
        yield "evaluate.benchmark", one
    yield "evaluate.folder", config.evaluate.folder
