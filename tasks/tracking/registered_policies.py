"""Where a run starts: from its base model, or from a policy that an earlier run has registered."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import mlflow
from mlflow.entities.model_registry import ModelVersion

from engine.config import Config
from engine.config.recipe import load
from engine.errors import BadInput
from engine.model.shape import read_shape
from engine.run.folder import RunFolder
from engine.run.start import ContinueFrom, RunStart, read_start
from tasks.console import say
from tasks.tracking.retry import retry_while_away
from tasks.tracking.tracked_run import tracking_uri

CHAMPION = "champion"
"""Alias of the registered policy that won the last paired comparison."""
LATEST = "latest"
"""The newest registered policy, whoever trained it."""
NIGHTLY = "nightly"
"""The newest one whose run itself began with this word: what people try by day is no link of the chain of nights."""
START_TAG = "metronome.start"
"""Tag of a version: with which word its run began (`RunStart.start`)."""


def registered_name(recipe: str) -> str:
    """The registered model that all runs of a recipe share."""
    return f"metronome-{Path(recipe).stem}"


def started_from(config: Config, recipe: str, start: ContinueFrom) -> tuple[Config, RunStart]:
    """The config with `model.path` the folder to start from, and how that came about. `start`: "base" (as it is),
    "nightly", "latest" or "champion".

    `run.seed` becomes another one, too: plus the number of the recipe's newest version, whoever registered it. So a run
    that goes on from another one's policy does not draw that one's prompts and responses again.

    A run folder that exists keeps what it began with (`as_begun`). "nightly" and "latest" without such a policy are the
    base model; "champion" without one is BadInput. Raises TrackingAway.
    """
    if RunFolder(config.folder).config.exists():
        return as_begun(config, start)
    if start == "base":
        return config, RunStart()
    name = registered_name(recipe)
    found = _registered(config, name, start)
    newest = _registered(config, name, LATEST)
    if found is None:
        say("start", f"no {'night' if start == NIGHTLY else 'run'} has registered a policy of {name} yet")
        path = config.model.path
        version = ""
    else:
        path = str(_fetched(config, found))
        version = f"models:/{name}/{found.version}"
    seed = config.run.seed + (int(newest.version) if newest is not None else 0)
    return _with(config, path, seed), RunStart(start=start, continued_from=version)


def as_begun(config: Config, start: ContinueFrom = "base") -> tuple[Config, RunStart]:
    """The config of a run that may be under way, with the model and the seed that it began with if it was continued;
    and how it began.

    A run that is resumed must not change its base because another one was registered meanwhile.
    """
    folder = RunFolder(config.folder)
    if not folder.config.exists():
        return config, RunStart()
    begun = read_start(folder.path)
    if begun.start == start == "base":
        return config, begun
    before = load(folder.config)
    return _with(config, before.model.path, config.run.seed if begun.start == "base" else before.run.seed), begun


def _with(config: Config, path: str, seed: int) -> Config:
    say("start", f"from {path}, run.seed = {seed}")
    model = config.model.model_copy(update={"path": path})
    return config.model_copy(update={"model": model, "run": config.run.model_copy(update={"seed": seed})})


def model_folder(config: Config, recipe: str, model: str) -> Config:
    """The config with `model.path` what a person named:
    a folder, a word of `started_from`, or empty for the config's own."""
    if model in (NIGHTLY, LATEST, CHAMPION):
        name = registered_name(recipe)
        found = _registered(config, name, model)
        if found is None:
            raise BadInput(
                f"no {'night' if model == NIGHTLY else 'run'} has registered a policy of {name} at "
                f"{tracking_uri(config)}: train one first, or name a folder"
            )
        model = str(_fetched(config, found))
    return config.model_copy(update={"model": config.model.model_copy(update={"path": model})}) if model else config


def _registered(config: Config, name: str, which: str) -> ModelVersion | None:
    """A registered policy; None: there is none. Raises BadInput when there is no champion, TrackingAway."""
    found = retry_while_away(f"the {which} policy of {name}", lambda: _version(config, name, which))
    if found is None and which == CHAMPION:
        raise BadInput(f"no version of {name} has the alias {CHAMPION} at {tracking_uri(config)}")
    return found


def _version(config: Config, name: str, which: str) -> ModelVersion | None:
    """The one with the alias, or the newest of all or of those that nights made (`START_TAG`)."""
    client = mlflow.MlflowClient(tracking_uri(config))
    if which == CHAMPION:
        models = client.search_registered_models(f"name = '{name}'")
        holder = models[0].aliases.get(CHAMPION) if models else None
        return None if holder is None else client.get_model_version(name, holder)
    nights = f" and tags.`{START_TAG}` = '{NIGHTLY}'" if which == NIGHTLY else ""
    newest = client.search_model_versions(f"name = '{name}'{nights}", max_results=1, order_by=["version_number DESC"])
    return newest[0] if newest else None


def _fetched(config: Config, version: ModelVersion) -> Path:
    """The policy's folder under `run.output`; downloaded once, and it appears whole or not at all."""
    folder = Path(config.run.output).resolve() / "models" / f"{version.name}-{version.version}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
            got = mlflow.artifacts.download_artifacts(
                version.source, dst_path=scratch, tracking_uri=tracking_uri(config)
            )
            shutil.move(got, folder)
    read_shape(folder)
    return folder
