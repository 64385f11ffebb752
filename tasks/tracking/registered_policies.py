"""Decides where a run starts: from its base model, or from a policy that an earlier run registered."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import mlflow
import msgspec
from mlflow.entities.model_registry import ModelVersion

from engine.config import Config, Run
from engine.config.recipe import find_file, load_config
from engine.errors import BadInput
from engine.model.shape import read_shape
from engine.run.folder import CONFIG, RunFolder
from engine.run.run_file import ContinueFrom, RunStart, read_run
from engine.run.served_model import FETCH, MODELS, REGISTERED
from tasks.terminal.console import named_deployment, say
from tasks.terminal.progress_display import fetched, show_progress
from tasks.tracking.mirror import clean_name
from tasks.tracking.mlflow_model import policy_folder
from tasks.tracking.store import STORE_ERRORS, first_line, retry_while_away, whole_store
from tasks.tracking.tracked_run import quote_name, shown_uri, tracking_uri

REGISTRY = "models:/"
"""Beginning of the address of a registered model, as MLflow writes it."""
CHAMPION = "champion"
"""Alias of the registered policy that won the last paired comparison."""
LATEST = "latest"
"""The newest registered policy of the recipe, from any run."""
NIGHTLY = "nightly"
"""The newest policy whose run was itself started with this word. So experiments by day do not enter the chain of
nights."""
REFUSED = r"""[/\\:"]"""
"""Characters that MLflow refuses in the name of a registered model, or that its filters can't quote."""
START_TAG = "metronome.start"
"""Tag of a version with the word with which its run was started (`RunStart.start`)."""


def registered_name(recipe: str, config: Config) -> str:
    """The registered model that all runs of a recipe share: metronome-RECIPE, or metronome-NAME-RECIPE for those of
    `metronome deploy --name NAME`. Runs on data other than the recipe's share metronome-RECIPE-DATA. A run's
    config.toml counts as the run's recipe. A name that MLflow would refuse is changed (`clean_name`)."""
    begun = read_run(Path(recipe).parent).start if Path(recipe).name == CONFIG else RunStart()
    name = begun.registered or clean_name(f"metronome-{named_deployment(Path(recipe).stem)}", REFUSED, "-")
    data = [one.path for one in config.data.sets]
    if _files(data) == _files([one.path for one in load_config(recipe).data.sets]):
        return name
    stems = [Path(path.partition(":")[0] if "://" not in path else path).stem for path in data]
    return clean_name(f"{name}-{clean_name('-'.join(stems), '[^A-Za-z0-9_.-]+', '-')}", REFUSED, "-")


def _files(paths: Sequence[str]) -> list[Path]:
    return [find_file(path).resolve() for path in paths]


def started_from(config: Config, recipe: str, start: ContinueFrom) -> tuple[Config, RunStart]:
    """The config with `model.path` set to the folder to start from, and a record of how the run started. `start`:
    "base" (unchanged), "nightly", "latest" or "champion".

    The number of the recipe's newest version is added to `run.seed`, so that a run that starts from another run's
    policy does not draw the same prompts and responses again.

    A run with an existing run folder keeps the record, and its config has the model and the seed with which it began.
    If there is no policy yet for "nightly" or "latest", the run starts from the base model. Raises BadInput for
    "champion" if there is none, and TrackingAway.
    """
    if RunFolder(config.folder).config.exists():
        begun = read_run(config.folder).start
        old = f"metronome-{Path(recipe).stem}" if recipe else ""  # an evaluation begins no run
        return config, msgspec.structs.replace(begun, recipe=begun.recipe or recipe, registered=begun.registered or old)
    name = registered_name(recipe, config)
    if start == "base":
        return config, RunStart(recipe=recipe, registered=name)
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
    begun = RunStart(start=start, continued_from=version, recipe=recipe, registered=name)
    say("start", f"from {path}, run.seed = {seed}")
    model = config.model.model_copy(update={"path": path})
    return config.model_copy(update={"model": model, "run": config.run.model_copy(update={"seed": seed})}), begun


def model_folder(config: Config, recipe: str, model: str) -> Config:
    """The config with `model.path` set to `model`: a folder, a word of `started_from`, or empty to leave it
    unchanged.
    """
    if model in (NIGHTLY, LATEST, CHAMPION):
        name = registered_name(recipe, config)
        found = _registered(config, name, model)
        if found is None:
            raise BadInput(
                f"no {'night' if model == NIGHTLY else 'run'} has registered a policy of {name} at "
                f"{shown_uri(config)}: train one first, or name a folder"
            )
        model = str(_fetched(config, found))
    return config.model_copy(update={"model": config.model.model_copy(update={"path": model})}) if model else config


def registered_folder(path: str, output: str) -> str:
    """The folder of `models:/NAME@ALIAS` or `models:/NAME/VERSION`, downloaded once to `output`/models; any other path
    as it is. The registry is that of MLFLOW_TRACKING_URI, else the store in `output`.

    Raises BadInput if the registry has no such version, and TrackingAway.
    """
    if not path.startswith(REGISTRY):
        return path
    name, _, which = path.removeprefix(REGISTRY).replace("@", "/").rpartition("/")
    if not name or not which or not ("@" in path or which.isdigit()):
        raise BadInput(
            f"model {path}: expected models:/NAME@ALIAS, for example models:/NAME@champion, or models:/NAME/3"
        )
    config = Config(run=Run(output=output))
    store = tracking_uri(config)
    if store.startswith("sqlite:///") and not Path(store.removeprefix("sqlite:///")).exists():
        raise BadInput(f"model {path}: no MLflow registry: {shown_uri(config)} does not exist; set MLFLOW_TRACKING_URI")
    found = retry_while_away(path, lambda: _named_version(config, name, which, by_alias="@" in path))
    if found is None:
        raise BadInput(f"model {path}: the registry at {shown_uri(config)} has no such version or alias")
    return str(_fetched(config, found))


def _named_version(config: Config, name: str, which: str, by_alias: bool) -> ModelVersion | None:
    """The version with an alias or a number; None if there is none."""
    client = mlflow.MlflowClient(whole_store(tracking_uri(config)))
    try:
        return (client.get_model_version_by_alias if by_alias else client.get_model_version)(name, which)
    except mlflow.MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def _registered(config: Config, name: str, which: str) -> ModelVersion | None:
    """A registered policy; None if there is none. Raises BadInput if there is no champion, and TrackingAway."""
    found = retry_while_away(f"the {which} policy of {name}", lambda: _version(config, name, which))
    if found is None and which == CHAMPION:
        raise BadInput(f"no version of {name} has the alias {CHAMPION} at {shown_uri(config)}")
    return found


def _version(config: Config, name: str, which: str) -> ModelVersion | None:
    """The version with the alias, the newest version, or the newest version of the nights (`START_TAG`)."""
    if which == CHAMPION:
        return _named_version(config, name, CHAMPION, by_alias=True)
    nights = f" and tags.`{START_TAG}` = '{NIGHTLY}'" if which == NIGHTLY else ""
    newest = mlflow.MlflowClient(whole_store(tracking_uri(config))).search_model_versions(
        f"name = {quote_name(name)}{nights}", max_results=1, order_by=["version_number DESC"]
    )
    return newest[0] if newest else None


def _fetched(config: Config, version: ModelVersion) -> Path:
    """The policy's folder under `run.output`, downloaded once. It is complete or absent."""
    folder = Path(config.run.output).resolve() / MODELS / f"{version.name}-{version.version}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=FETCH) as scratch:
            with show_progress("start", fetched(f"{version.name} version {version.version}", Path(scratch))):
                got = policy_folder(Path(_downloaded(config, version, scratch)))
            (got / REGISTERED).write_text(f"{REGISTRY}{version.name}/{version.version}\n")
            try:
                got.rename(folder)
            except OSError:
                if not folder.exists():  # else another flow has fetched it meanwhile
                    raise
    read_shape(folder)
    return folder


def _downloaded(config: Config, version: ModelVersion, scratch: str) -> str:
    """The policy's folder in `scratch`. Raises BadInput if its files are gone, and TrackingAway."""
    what = f"the policy of {version.name} version {version.version}"
    uri = tracking_uri(config)

    def download() -> str:
        try:
            return str(mlflow.artifacts.download_artifacts(version.source, dst_path=scratch, tracking_uri=uri))
        except STORE_ERRORS as error:
            # MLflow reports a server's 404 only in the text of its own error
            if not uri.startswith("http") or "404 Client Error" in str(error):
                raise FileNotFoundError(first_line(error)) from error
            raise

    try:
        return retry_while_away(what, download)
    except STORE_ERRORS as error:
        raise BadInput(
            f"{what} is registered at {shown_uri(config)}, but its files are gone ({first_line(error)}): put them "
            "back, or start from another policy"
        ) from None
