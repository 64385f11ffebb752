"""Reads models and public datasets of the Hugging Face hub by name. Cache, login, offline mode, progress and
the resuming of a broken download are those of its own libraries (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from engine.config.recipe import find_file
from engine.data.problem_files import has_suffix, table_rows
from engine.errors import BadInput
from engine.types import JsonObject

_NAME = r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)"
_REVISION = r"(@(?P<revision>[\w./-]+))?"
_MODEL = re.compile(_NAME + _REVISION)
_DATASET = re.compile(_NAME + r"(:((?P<config>[\w.-]+)/)?(?P<split>[\w.-]+))?" + _REVISION)
FULL = "owner/name:config/split@revision"
"""The whole id of a dataset."""
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Files of a model that are downloaded: no pickle, no code, and none in a subfolder."""
REACH_S = 10.0
"""Time limit in seconds for the hub to say whether it has a model or a dataset. Without a network, `datasets` itself
would try for half a minute."""


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the hub. All but the name may be left out of its id (`FULL`)."""

    name: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None

    @property
    def label(self) -> str:
        """A short name for tables: the dataset without its owner, and the split."""
        return self.name.partition("/")[2] + (f":{self.split}" if self.split else "")

    def __str__(self) -> str:
        config = f"{self.config}/" if self.config not in (None, "default") else ""
        split = f":{config}{self.split}" if self.split else ""
        return f"{self.name}{split}{f'@{self.revision}' if self.revision else ''}"


def is_model_name(path: str) -> bool:
    """Whether a path has the form owner/name or owner/name@revision, and there is no folder `owner` on this machine
    that it would be in."""
    return _MODEL.fullmatch(path) is not None and not find_file(path.partition("/")[0]).is_dir()


def fetch_model(path: str) -> Path:
    """The folder in the hub's cache with a model (`is_model_name`), downloaded unless it is there. Its path has the
    model's name and commit.

    Raises BadInput if the hub has no such model or no such revision, does not allow to read it or cannot be reached,
    if the model has no config.json or no safetensors, or if it is not in the cache and the hub is switched off.
    """
    import huggingface_hub
    from huggingface_hub import constants

    name, revision = _model_of(path)
    with _refusing(f"model {path}", name, revision):
        if not constants.HF_HUB_OFFLINE:
            found = huggingface_hub.HfApi().model_info(name, revision=revision, timeout=REACH_S)
            check_files(path, [one.rfilename for one in found.siblings or []], "on the hub")
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(MODEL_FILES),
                ignore_patterns=["*/*"],
                etag_timeout=REACH_S,
                local_files_only=constants.HF_HUB_OFFLINE,
            )
        )


def fetch_shape(path: str) -> Path:
    """A folder with at least the config.json of a model of the hub. Raises BadInput like `fetch_model`."""
    import huggingface_hub
    from huggingface_hub import constants

    name, revision = _model_of(path)
    with _refusing(f"model {path}", name, revision):
        if not constants.HF_HUB_OFFLINE:
            huggingface_hub.HfApi().model_info(name, revision=revision, timeout=REACH_S)
        file = huggingface_hub.hf_hub_download(name, "config.json", revision=revision, etag_timeout=REACH_S)
    return Path(file).parent


def check_files(path: str, names: Collection[str], where: str) -> None:
    """Raise BadInput unless a model has config.json and safetensors. `where` its files are is said."""
    for wanted in ("config.json", "*.safetensors"):
        if not any(fnmatchcase(name, wanted) and "/" not in name for name in names):
            raise BadInput(
                f"model {path}: it has no {wanted} {where}; expected config.json, tokenizer files and *.safetensors "
                "(other weight formats are not read, pickle is unsafe)"
            )


def is_hub_id(path: str) -> bool:
    """Whether the path has the form of a `HubDataset` and is not a file or folder on this machine."""
    return _DATASET.fullmatch(path) is not None and not has_suffix(path) and not find_file(path).exists()


def set_name(path: str) -> str:
    """The short name of a problem set: its file name without suffix, or the label of a dataset."""
    return dataset_of(path).label if is_hub_id(path) else Path(path).stem


def dataset_of(path: str) -> HubDataset:
    """The dataset that a path of the form `HubDataset` names. Raises BadInput for another form."""
    match = _DATASET.fullmatch(path)
    if match is None:
        raise BadInput(f"problem set {path}: not a dataset id; expected owner/name, owner/name:split or {FULL}")
    return HubDataset(match["name"], match["config"], match["split"], match["revision"])


def read_hub(path: str) -> tuple[str, list[tuple[str, JsonObject]]]:
    """The dataset's id with the commit that was read, and ("row 3", columns) for each row of the split.

    The default split is "train", or the only one; the default config is the dataset's own, or "main". Raises BadInput
    if there is no such dataset, revision, config or split, or if the hub cannot be reached and the dataset is not in
    the cache.
    """
    import datasets  # imported here, because it takes five seconds
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars

    wanted = dataset_of(path)
    datasets.disable_progress_bars()
    disable_progress_bars()
    with _refusing(
        f"problem set {path}", f"datasets/{wanted.name}", wanted.revision, datasets.exceptions.DatasetsError
    ):
        commit = None
        if not constants.HF_HUB_OFFLINE:
            found = huggingface_hub.HfApi().dataset_info(wanted.name, revision=wanted.revision, timeout=REACH_S)
            commit = found.sha
            if found.gated:
                huggingface_hub.auth_check(wanted.name, repo_type="dataset")
        if wanted.revision:  # remembers the commit for a later time without the hub
            there = huggingface_hub.resolve_revision(wanted.name, repo_type="dataset", revision=wanted.revision)
            commit = there.resolved
        splits = _load(path, wanted, commit)
    rows = rows_of(path, splits, wanted.split)
    split = _chosen(splits, wanted.split)
    config, _, read = Path(splits[split].cache_files[0]["filename"]).parts[-4:-1]
    if commit not in (None, read):
        raise BadInput(
            f"problem set {path}: commit {commit} of it is wanted, the cache only has {read}, and the hub gives no "
            "other now; read it once where the hub can be reached and without HF_HUB_OFFLINE"
        )
    return str(HubDataset(wanted.name, config, split, read)), rows


def rows_of(path: str, splits: Any, split: str | None) -> list[tuple[str, JsonObject]]:  # noqa: ANN401
    """The rows of one split of a `datasets.DatasetDict`, numbered. Raises BadInput if there is no such split."""
    wanted = _chosen(splits, split)
    if wanted not in splits:
        raise BadInput(
            f"problem set {path}: the dataset has no split {wanted}; it has {', '.join(splits)}: "
            f"give {re.split('[:@]', path)[0]}:SPLIT"
        )
    rows = table_rows(splits[wanted].with_format("arrow")[:])  # as stored: pictures are not decoded
    return [(f"row {number}", row) for number, row in enumerate(rows, start=1)]


def _chosen(splits: Any, split: str | None) -> str:  # noqa: ANN401
    return split or ("train" if "train" in splits or len(splits) != 1 else next(iter(splits)))


def _load(path: str, wanted: HubDataset, commit: str | None) -> Any:  # noqa: ANN401
    import datasets
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and not wanted.config:  # `datasets` would take the config that was cached last
        for config in ("default", "main"):
            with suppress(ValueError):
                return datasets.load_dataset(wanted.name, config)
    try:
        return datasets.load_dataset(wanted.name, wanted.config, revision=commit)
    except ValueError:
        configs = datasets.get_dataset_config_names(wanted.name, revision=commit)
        if wanted.config in configs or len(configs) == 1:
            raise
        if not wanted.config and "main" in configs:
            return datasets.load_dataset(wanted.name, "main", revision=commit)
        none = f"the dataset has no config {wanted.config}" if wanted.config else "the dataset has several configs"
        raise BadInput(
            f"problem set {path}: {none}; give one of {', '.join(configs)} as {wanted.name}:CONFIG/SPLIT"
        ) from None


def _model_of(path: str) -> tuple[str, str | None]:
    match = _MODEL.fullmatch(path)
    if match is None:
        raise BadInput(f"model {path}: not a name on the hub; expected owner/name or owner/name@revision")
    return match["name"], match["revision"]


@contextmanager
def _refusing(what: str, page: str, revision: str | None, also: type[Exception] = OSError) -> Iterator[None]:
    """Turn an error of the hub's libraries, or one of the class `also`, into BadInput."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import httpx

    try:
        yield
    except (OSError, ValueError, RuntimeError, httpx.HTTPError, errors.RevisionResolutionError, also) as error:
        raise BadInput(f"{what}: {_why(error, revision, f'{constants.ENDPOINT}/{page}')}") from None


def _why(error: Exception, revision: str | None, page: str) -> str:
    """What an error of the hub's libraries means, and what would be right. `page`: the address on the hub."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import httpx

    first = (str(error).splitlines() or [type(error).__name__])[0]
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)

    def is_any(kind: type[Exception]) -> bool:
        return any(isinstance(one, kind) for one in causes)

    if constants.HF_HUB_OFFLINE:
        return (
            f"no such file or folder here, HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} does not have "
            f"it ({first}); unset HF_HUB_OFFLINE to download it"
        )
    if is_any(errors.GatedRepoError):
        return f"it is gated: accept its terms at {page}, then log in with `hf auth login` or set HF_TOKEN"
    if is_any(errors.RevisionNotFoundError):
        return f"the hub has no revision {revision} of it; give a branch, a tag or a commit of {page}"
    if is_any(errors.RepositoryNotFoundError):
        return (
            f"no such file or folder here, and the Hugging Face hub has no {page}; check the name, or log in with "
            "`hf auth login` or set HF_TOKEN if it is private"
        )
    if is_any(httpx.TransportError):
        return (
            f"no such file or folder here, and the Hugging Face hub can't be reached for {page} ({first}); copy its "
            "files to this machine, or set HF_HUB_OFFLINE=1 if it is in the cache"
        )
    return f"{page} can't be read ({first})"
