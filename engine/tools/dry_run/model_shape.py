"""The shape of a recipe's model, which a dry run and a plan need without its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.config.recipe import HOME, check_made, find_file
from engine.data.hub import fetch_shape, is_model_name
from engine.data.named_models import fetch_s3_config
from engine.errors import BadInput
from engine.model.shape import ModelShape, read_shape
from engine.run.s3 import SCHEME

PUBLISHED = HOME / "infra/recipes/papers/models.json"
"""The published config.json of the papers' models, by the last part of their names on the Hugging Face hub."""


def shape_of(path: str) -> tuple[ModelShape, str]:
    """The shape of `model.path` and its source: config.json if the folder exists or is on S3, else that of a model of
    the papers' recipes, else config.json on the Hugging Face hub. Raises BadInput for a model with none of them."""
    check_made(path)
    if path.startswith(SCHEME):
        return _shape_on_s3(path), "config.json on S3"
    folder = find_file(path)
    if (folder / "config.json").is_file():
        return read_shape(folder, weights=False), "config.json"
    published = json.loads(PUBLISHED.read_text())
    if config := published.get(folder.name):
        return _shape_in(path, lambda place: _write(place, config)), "published config.json"
    known = f"a folder with only config.json is enough, and the dry run has the sizes of {', '.join(published)}"
    if is_model_name(path):
        try:
            return read_shape(fetch_shape(path), weights=False), "config.json on the hub"
        except BadInput as error:
            raise BadInput(f"{error}; {known}") from None
    raise BadInput(f"model.path = {path!r}: no config.json there; {known}")


@cache
def _shape_on_s3(path: str) -> ModelShape:
    """Read once per process: a plan asks for each layout."""
    return _shape_in(path, lambda place: fetch_s3_config(path, place))


def _shape_in(path: str, fill: Callable[[Path], object]) -> ModelShape:
    """The shape by the config.json that `fill` puts into a folder; errors name `path`."""
    with TemporaryDirectory() as folder:
        fill(Path(folder))
        try:
            return read_shape(Path(folder), weights=False)
        except BadInput as error:
            raise BadInput(str(error).replace(folder, path)) from None


def _write(place: Path, config: object) -> None:
    (place / "config.json").write_text(json.dumps(config))
