"""Reads public datasets of the Hugging Face hub by id, with the library `datasets`."""

from __future__ import annotations

import re
from typing import Any

from engine.config.recipe import find_file
from engine.data.problem_files import has_suffix, table_rows
from engine.errors import BadInput
from engine.types import JsonObject

_ID = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<split>[\w.-]+))?")
REACH_S = 10.0
"""Time limit in seconds for the hub to say whether it has a dataset. Without a network, `datasets` itself would try for
half a minute."""


def is_hub_id(path: str) -> bool:
    """Whether the path has the form owner/name or owner/name:split and is not a file or folder on this machine."""
    return _ID.fullmatch(path) is not None and not has_suffix(path) and not find_file(path).exists()


def read_hub(path: str) -> list[tuple[str, JsonObject]]:
    """("row 3", columns) for each row of the split. The default split is "train", or the only one.

    Raises BadInput if there is no such dataset or split, or if the hub cannot be reached and the dataset is not in the
    cache.
    """
    import datasets  # imported here, because it takes five seconds

    match = _ID.fullmatch(path)
    if match is None:
        raise BadInput(f"problem set {path}: not a dataset id; expected owner/name or owner/name:split")
    name = match["name"]
    _check_reachable(name)
    try:
        splits = datasets.load_dataset(name)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise BadInput(f"problem set {path}: the dataset can't be read ({_first_line(error)})") from None
    return rows_of(path, splits, match["split"])


def rows_of(path: str, splits: Any, split: str | None) -> list[tuple[str, JsonObject]]:  # noqa: ANN401
    """The rows of one split of a `datasets.DatasetDict`, numbered. Raises BadInput if there is no such split."""
    wanted = split or ("train" if "train" in splits or len(splits) != 1 else next(iter(splits)))
    if wanted not in splits:
        raise BadInput(
            f"problem set {path}: the dataset has no split {wanted}; it has {', '.join(splits)}: "
            f"give {path.partition(':')[0]}:SPLIT"
        )
    rows = table_rows(splits[wanted].with_format("arrow")[:])  # as stored: pictures are not decoded
    return [(f"row {number}", row) for number, row in enumerate(rows, start=1)]


def _check_reachable(name: str) -> None:
    from huggingface_hub import HfApi, constants, errors
    from huggingface_hub.utils import httpx

    if constants.HF_HUB_OFFLINE:
        return
    try:
        HfApi().dataset_info(name, timeout=REACH_S)
    except errors.RepositoryNotFoundError:
        raise BadInput(
            f"problem set {name}: no such file or folder, nor a public dataset of the Hugging Face hub"
        ) from None
    except (OSError, httpx.HTTPError) as error:
        raise BadInput(
            f"problem set {name}: no such file or folder here, and the Hugging Face hub can't be reached to see "
            f"whether it has such a dataset ({_first_line(error)}); copy the dataset's files to this machine, or set "
            "HF_HUB_OFFLINE=1 if it is in the cache"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
