"""Finds whole runs that can go by a rule, wherever they left something: in the run folder, at `checkpoint.path`, in
MLflow and on the Prefect server.

MLflow keeps a run with its figures and its small files; only its policy and the registered versions of it go.
"""

from __future__ import annotations

import shutil
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from engine.errors import BadInput
from engine.run.checkpoint_store import delete_published, place_of, published_size
from engine.run.folder import RunFolder
from engine.run.identity import read_run_id
from engine.run.progress import folder_size
from engine.run.run_start import read_start

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion
    from prefect.client.schemas.objects import FlowRun

DAY_S = 86400.0
YOUNG_S = 3600.0
"""What changed so few seconds ago may be in use."""
PAGE = 200
"""Number of flow runs that Prefect gives in one reply."""


@dataclass(frozen=True)
class Removable:
    """Something that can go."""

    path: Path | str
    """Where it is: a file or folder, or an address or name elsewhere."""
    why: str
    size: int
    """In bytes; 0 where that is not known."""
    remove: Callable[[], None]


@dataclass(frozen=True)
class Retention:
    """Which whole runs stay. 0: this part keeps none. A rule of zeros keeps all runs."""

    last: int = 0
    """The newest runs of each recipe."""
    days: float = 0.0
    """Runs that changed within so many days."""

    def __bool__(self) -> bool:
        return bool(self.last or self.days)


def find_old(
    folders: Sequence[RunFolder], rule: Retention, say: Callable[[str], None], beside: Sequence[Path]
) -> dict[Path, list[Removable]]:
    """What can go of each run that the rule does not keep, by run folder; the folder itself comes last, so that an
    interrupted deletion can be repeated.

    A run also stays if it changed within the last hour, if it is a copy of a run, if another run that stays starts from
    its policy (`beside`: the folders of all runs that may), if MLflow does not know it, if its
    registered version has an alias (such as champion) or is the newest of its model or of the nights, or if Prefect has
    yet to resume it; `say` gets the reason. Raises BadInput if MLflow or Prefect does not answer, since what they know
    may keep a run.
    """
    old = _by_rule(folders, rule)
    going = {folder.path for folder in old}
    models = [_base(RunFolder(path)) for path in beside if path not in going]
    found: dict[Path, list[Removable]] = {}
    for folder in old:  # newest first: a run starts from an older one
        own: list[Removable] = []
        why = "a run that stays starts from its policy" if any(_within(one, folder.path) for one in models) else ""
        why = why or _is_copy(folder)
        for part in (_in_mlflow, _in_prefect) if not why else ():
            reason, parts = part(folder)
            why = why or reason
            own += parts
        if why:
            say(f"{folder.path} stays: {why}")
            models.append(_base(folder))
            continue
        found[folder.path] = [*own, *_published(folder), _folder(folder)]
    return found


def _by_rule(folders: Sequence[RunFolder], rule: Retention) -> list[RunFolder]:
    """The runs that the rule lets go, newest first."""
    now = time.time()
    seen: dict[str, int] = {}
    old = []
    for age, folder in sorted(((now - _changed(one), one) for one in folders), key=lambda each: each[0]):
        name = read_start(folder.path).registered
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > rule.last and age > max(YOUNG_S, rule.days * DAY_S):
            old.append(folder)
    return old


def _changed(folder: RunFolder) -> float:
    files = (folder.config, folder.steps, folder.evaluations, folder.attempts)
    return max(file.stat().st_mtime for file in files if file.exists())


def _base(folder: RunFolder) -> Path:
    return Path(tomllib.loads(folder.config.read_text())["model"]["path"])


def _within(model: Path, run: Path) -> bool:
    """Whether a model may be in a run folder. A relative one counts from a folder that is not known here, and a link
    may lead to it, so only names are compared."""
    return run.name in model.parts[:-1]


def _is_copy(folder: RunFolder) -> str:
    """Why a folder may not be the one that its run wrote. What the run left elsewhere is then not this folder's."""
    own = folder.read_config().folder
    if own.resolve() == folder.path:
        return ""
    return f"by its config.toml it belongs at {own}; if it is no copy, prune where `metronome run` was called"


def _folder(folder: RunFolder) -> Removable:
    def remove() -> None:
        for path in folder.path.iterdir():
            if path != folder.config:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        folder.config.unlink()  # last: with it the folder is still a run folder, and the command can be repeated
        folder.path.rmdir()

    return Removable(folder.path, "an old run", folder_size(folder.path), remove)


def _published(folder: RunFolder) -> Iterator[Removable]:
    place = place_of(folder.read_config())
    number = read_run_id(folder.path)
    if place and number and (size := published_size(place, number)):
        yield Removable(place, "its checkpoints", size, partial(delete_published, place, number))


def _in_mlflow(folder: RunFolder) -> tuple[str, list[Removable]]:
    """Why a run stays for MLflow ("" if it need not), and else what can go there."""
    import mlflow

    from tasks.tracking import tracked_run
    from tasks.tracking.retry import STORE_ERRORS, first_line
    from tasks.tracking.sqlite_store import sqlite_file

    config = folder.read_config()
    file = folder.path / tracked_run.RUN_ID
    uri = tracked_run.tracking_uri(config)
    store = sqlite_file(uri)
    if not file.is_file():
        return "", []
    unknown = (
        f"MLflow ({tracked_run.shown_uri(config)}) does not know it: set MLFLOW_TRACKING_URI to the store that does, "
        f"or delete {file} if there is none any more"
    )
    if store is not None and not store.is_file():
        return unknown, []
    client = mlflow.MlflowClient(uri)
    try:
        return _in_store(client, file.read_text().strip())
    except STORE_ERRORS as error:
        if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
            return unknown, []
        raise BadInput(
            f"MLflow ({tracked_run.shown_uri(config)}) does not say which runs it needs, so none is deleted: "
            f"{first_line(error)}"
        ) from None


def _in_store(client: MlflowClient, run_id: str) -> tuple[str, list[Removable]]:
    client.get_run(run_id)  # a store that does not know the run says nothing about its versions
    versions = list(client.search_model_versions(f"run_id = '{run_id}'"))
    for version in versions:
        if why := _needed(client, version):
            return why, []
    if not versions:
        return "", []
    files = client.list_artifacts(run_id, "policy")
    names = ", ".join(f"{one.name} version {one.version}" for one in versions)
    size = sum(file.file_size or 0 for file in files)
    return "", [Removable(f"MLflow run {run_id}", f"policy, {names}", size, partial(_forget, client, run_id, versions))]


def _needed(client: MlflowClient, version: ModelVersion) -> str:
    from tasks.tracking.registered_policies import NIGHTLY, START_TAG
    from tasks.tracking.tracked_run import quote_name

    name = version.name
    number = str(version.version)
    if held := [alias for alias, of in client.get_registered_model(name).aliases.items() if str(of) == number]:
        return f"version {number} of {name} is its {held[0]}"
    for what, tag in (("version", ""), ("night", f" and tags.`{START_TAG}` = '{NIGHTLY}'")):
        newest = client.search_model_versions(
            f"name = {quote_name(name)}{tag}", max_results=1, order_by=["version_number DESC"]
        )
        if newest and str(newest[0].version) == number:
            return f"version {number} of {name} is its newest {what}, from which the next one starts"
    return ""


def _forget(client: MlflowClient, run_id: str, versions: Sequence[ModelVersion]) -> None:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    for version in versions:
        client.delete_model_version(version.name, str(version.version))
    get_artifact_repository(client.get_run(run_id).info.artifact_uri, client.tracking_uri).delete_artifacts("policy")


def _in_prefect(folder: RunFolder) -> tuple[str, list[Removable]]:
    """The same for Prefect: the flow runs that entered the folder, on the server of PREFECT_API_URL, if it is set. Runs
    of other folders may have the same name."""
    import httpx
    from prefect.settings import get_current_settings

    if not get_current_settings().api.url:
        return "", []
    try:
        found = _flow_runs(folder)
    except httpx.HTTPError as error:
        raise BadInput(
            f"the Prefect server (PREFECT_API_URL) does not say which runs it needs, so none is deleted: {error}"
        ) from None
    for run in found:
        if run.state is None or not run.state.is_final():
            return f"its flow run in Prefect is {run.state_name}", []
    ids = [run.id for run in found]
    label = f"Prefect: {folder.path.name}"
    return "", [Removable(label, f"{len(ids)} flow runs", 0, partial(_delete_flow_runs, ids))] if ids else []


def _flow_runs(folder: RunFolder) -> list[FlowRun]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    try:
        ids = [UUID(one) for one in folder.flow_runs.read_text().split()] if folder.flow_runs.exists() else []
    except ValueError:
        raise BadInput(
            f"{folder.flow_runs}: the file is damaged, so the run's flow runs are unknown; delete the file, and they "
            "stay in Prefect"
        ) from None
    found: list[FlowRun] = []
    with get_client(sync_client=True) as client:
        for start in range(0, len(ids), PAGE):
            wanted = FlowRunFilter(id=FlowRunFilterId(any_=ids[start : start + PAGE]))
            found += client.read_flow_runs(flow_run_filter=wanted, limit=PAGE)
    return found


def _delete_flow_runs(ids: Sequence[object]) -> None:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        for one in ids:
            client.delete_flow_run(one)  # type: ignore[arg-type]
