"""A node's copy of the launcher's model."""

import os
import time

import pytest

from engine.errors import BadInput
from tasks.cluster import ray_models
from tasks.cluster.ray_models import ModelSource, find_digests, model_here


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder, and this node's place for copies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ray_models, "PIECE", 3)
    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in {"config.json": "{}", "model.safetensors": "weights", "tokenizer.json": ""}.items():
        (folder / name).write_text(text)
    (folder / "notes.md").write_text("not of the model")
    return folder


def no_read(name, offset):
    raise AssertionError(f"{name} was fetched")


def test_the_launchers_folder_is_used_where_it_has_the_same_files(model):
    place, held = model_here(str(model), find_digests(model), no_read)
    with held:
        assert place == model


def test_a_copy_is_fetched_once_and_its_files_are_the_launchers(model, tmp_path):
    digests = find_digests(model)
    elsewhere = str(tmp_path / "elsewhere")
    place, _ = model_here(elsewhere, digests, ModelSource(str(model)).piece)
    assert {file.name for file in place.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert find_digests(place) == digests
    assert model_here(elsewhere, digests, no_read)[0] == place
    (place / "model.safetensors").write_text("Weights")  # damaged: fetched again
    assert model_here(elsewhere, digests, ModelSource(str(model)).piece)[0] == place
    assert find_digests(place) == digests


def test_another_model_under_the_same_path_is_not_used(model, tmp_path):
    digests = find_digests(model)
    source = ModelSource(str(model.rename(tmp_path / "launcher")))
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("wEights")
    place, _ = model_here(str(model), digests, source.piece)
    assert place != model
    assert find_digests(place) == digests


def test_a_file_that_arrives_with_another_digest_is_refused_by_name(model):
    digests = find_digests(model)
    (model / "model.safetensors").write_text("other weights")
    with pytest.raises(BadInput, match=r"model.safetensors has changed since the run began"):
        model_here(str(model), digests, ModelSource(str(model)).piece)
    assert not [one for one in ray_models._copies().iterdir() if one.is_dir() and one.suffix != ".partial"]


def test_copies_that_nobody_uses_go_and_those_in_use_stay(model, tmp_path):
    read = ModelSource(str(model)).piece
    held, free = [], []
    for kept, text in ((held, "one"), (free, "two")):
        (model / "config.json").write_text(text)
        kept.append(model_here("gone", find_digests(model), read))
    with held[0][1]:
        for place, _ in held + free:
            os.utime(place, (0, time.time() - ray_models.UNUSED_S - 60.0))
        (model / "config.json").write_text("three")
        model_here("gone", find_digests(model), read)
        assert held[0][0].is_dir()
        assert not free[0][0].exists()
