"""Where a run starts: from its base model, or from a policy that an earlier run has registered."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import mlflow
from mlflow.entities.model_registry import ModelVersion

from engine.config import Config
from engine.errors import BadInput
from engine.model.shape import read_shape
from engine.recipe import load
from engine.run_folder import RunFolder
from tasks.console import say
from tasks.patience import patiently
from tasks.tracking import tracking_uri

CHAMPION = "champion"
"""Alias of the registered policy that won the last paired comparison."""


def registered_name(recipe: str) -> str:
    """The registered model that all runs of a recipe share."""
    return f"metronome-{Path(recipe).stem}"


def started_from(config: Config, recipe: str, start: str) -> Config:
    """The config with `model.path` the folder to start from. `start`: "base" (as it is), "latest" or "champion".

    A run folder that exists keeps what it began with: a resumed run must not change its base because another run was
    registered meanwhile. "latest" without any registered policy is the base model; "champion" without one is BadInput.
    """
    if start == "base":
        return config
    begun = RunFolder(config.folder).config
    path = load(begun).model.path if begun.exists() else _registered(config, registered_name(recipe), start)
    if path is None:
        say("start", f"no policy of {registered_name(recipe)} is registered yet: from {config.model.path}")
        return config
    say("start", f"from {path}")
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def model_folder(config: Config, recipe: str, model: str) -> Config:
    """The config with `model.path` what a person named: a folder, "latest", "champion", or empty for the config's own."""
    if model in ("latest", CHAMPION):
        found = _registered(config, registered_name(recipe), model)
        if found is None:
            raise BadInput(f"no policy of {registered_name(recipe)} is registered at {tracking_uri(config)}: train one first, or "
                           "name a folder")
        model = found
    return config.model_copy(update={"model": config.model.model_copy(update={"path": model})}) if model else config


def _registered(config: Config, name: str, which: str) -> str | None:
    """A registered policy as a folder under `run.output`, fetched if it is not there; None: none is registered.

    Raises TrackingAway.
    """
    found = patiently(f"the {which} policy of {name}", lambda: _versions(config, name, which))
    if not found and which == CHAMPION:
        raise BadInput(f"no version of {name} has the alias {CHAMPION} at {tracking_uri(config)}")
    if not found:
        return None
    newest = max(found, key=lambda version: int(version.version))
    return str(_fetched(Path(config.run.output).resolve() / "models" / f"{name}-{newest.version}", newest.source, config))


def _versions(config: Config, name: str, which: str) -> list[ModelVersion]:
    """All of them, or those with the alias."""
    client = mlflow.MlflowClient(tracking_uri(config))
    found = client.search_model_versions(f"name = '{name}'")
    if which != CHAMPION:
        return list(found)
    return [version for version in found if CHAMPION in client.get_model_version(name, version.version).aliases]


def _fetched(folder: Path, source: str, config: Config) -> Path:
    """Download once; the folder appears whole or not at all."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
            got = mlflow.artifacts.download_artifacts(source, dst_path=scratch, tracking_uri=tracking_uri(config))
            shutil.move(got, folder)
    read_shape(folder)
    return folder
