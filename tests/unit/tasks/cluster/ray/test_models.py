"""A node's copy of the launcher's model."""

import os
import sys
import time
from types import SimpleNamespace

import pytest

from engine.errors import BadInput, DeadlineError
from tasks.cluster.ray import models as ray_models
from tasks.cluster.ray.models import ModelSource, PlacedModel, find_digests, model_here


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


def source(model):
    return ModelSource(str(model)).piece


def copies():
    return [one for one in ray_models._copies().iterdir() if one.is_dir()]


def test_the_launchers_folder_is_used_where_it_has_the_same_files_and_else_a_copy_that_is_fetched_once(model, tmp_path):
    digests = find_digests(model)
    assert model_here(str(model), digests, no_read)[0] == model
    elsewhere = str(tmp_path / "elsewhere")
    place, _ = model_here(elsewhere, digests, source(model))
    assert {file.name for file in place.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert find_digests(place) == digests
    assert model_here(elsewhere, digests, no_read)[0] == place
    (place / "model.safetensors").write_text("Weights")  # damaged: fetched again
    assert model_here(elsewhere, digests, source(model))[0] == place
    assert find_digests(place) == digests
    read = source(model.rename(tmp_path / "launcher"))
    model.mkdir()  # another model under the same path
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("wEights")
    assert model_here(str(model), digests, read)[0] == place


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda model: (model / "model.safetensors").write_text("other"),
            "model.safetensors has changed since the run",
        ),
        (lambda model: model.rename(model.with_name("moved")), "model/config.json is gone since the run began"),
    ],
)
def test_a_file_that_is_gone_or_arrives_with_another_digest_is_refused_by_name(model, change, said):
    digests = find_digests(model)
    change(model)
    with pytest.raises(BadInput, match=said):
        model_here("gone", digests, source(model))
    assert [one for one in copies() if one.suffix != ".partial"] == []


class Interrupted(Exception):
    """The node that fetches dies."""


def counted(model, most=sys.maxsize):
    """A `read` that ends the fetch after `most` pieces, and what was asked of it."""
    asked = []
    read = source(model)

    def piece(name, offset):
        asked.append((name, offset))
        if len(asked) > most:
            raise Interrupted
        return read(name, offset)

    return piece, asked


def test_a_fetch_that_was_interrupted_goes_on_where_it_was(model):
    (model / "model-00002.safetensors").write_text("more weights")
    digests = find_digests(model)
    for most in range(1, 8):
        read, _ = counted(model, most)
        with pytest.raises(Interrupted):
            model_here("gone", digests, read)
        (partial,) = copies()
        before = {file.name: file.stat().st_size for file in partial.iterdir()}
        read, asked = counted(model)
        place, held = model_here("gone", digests, read)
        held.close()
        assert find_digests(place) == digests
        assert len(before) > 0
        assert all(offset >= before.get(name, 0) for name, offset in asked)  # nothing that was there was asked for
        for file in place.iterdir():
            file.unlink()
        place.rmdir()


def test_the_beginning_of_another_file_is_fetched_again_once_and_then_refused(model):
    digests = find_digests(model)
    read, _ = counted(model, 3)
    with pytest.raises(Interrupted):
        model_here("gone", digests, read)
    (partial,) = copies()
    (partial / "model.safetensors").write_text("WEI")
    read, asked = counted(model)
    place, held = model_here("gone", digests, read)
    held.close()
    assert find_digests(place) == digests
    assert [offset for name, offset in asked if name == "model.safetensors"] == [3, 6, 7, 0, 3, 6]
    (place / "model.safetensors").write_text("WEIGHTS and more")  # a copy that was damaged
    (model / "model.safetensors").write_text("others")
    read, asked = counted(model)
    with pytest.raises(BadInput, match=r"gone/model.safetensors has changed since the run began"):
        model_here("gone", digests, read)
    assert [offset for name, offset in asked if name == "model.safetensors"] == [16, 0, 3, 6]
    (model / "model.safetensors").write_text("weights")
    read, asked = counted(model)
    place, held = model_here("gone", digests, read)
    with held:
        assert find_digests(place) == digests
    assert ("config.json", 0) not in asked  # it has stayed


def test_copies_that_nobody_uses_go_and_those_in_use_stay(model, tmp_path):
    read = source(model)
    held = []
    free = []
    for kept, text in ((held, "one"), (free, "two")):
        (model / "config.json").write_text(text)
        kept.append(model_here("gone", find_digests(model), read))
    free[0][1].close()
    with held[0][1]:
        for place, _ in held + free:
            os.utime(place, (0, time.time() - ray_models.UNUSED_S - 60.0))
        (model / "config.json").write_text("three")
        model_here("gone", find_digests(model), read)
        assert held[0][0].is_dir()
        assert not free[0][0].exists()


def test_a_copy_that_is_about_to_be_used_is_not_removed_by_the_fetch_of_another_model(model, monkeypatch):
    digests = find_digests(model)
    copy, held = model_here("gone", digests, source(model))
    held.close()
    os.utime(copy, (0, time.time() - ray_models.UNUSED_S - 60.0))
    same = ray_models._same

    def meanwhile(folder, digests):
        found = same(folder, digests)
        if folder == copy:
            ray_models._sweep(copy.with_name("another"))
        return found

    monkeypatch.setattr(ray_models, "_same", meanwhile)
    place, held = model_here("gone", digests, no_read)
    with held:
        os.utime(copy, (0, time.time() - ray_models.UNUSED_S - 60.0))
        ray_models._sweep(copy.with_name("another"))
        assert find_digests(place) == digests


def test_a_node_keeps_one_copy_of_evaluated_policies_and_those_in_use(model):
    read = source(model)
    _, trained = model_here("gone", find_digests(model), read)
    trained.close()
    places = []
    locks = []
    for text in ("first", "second", "third", "fourth"):
        (model / "config.json").write_text(text)
        place, held = model_here("gone", find_digests(model), read, once=True)
        places.append(place)
        locks.append(held)
        if text != "first":
            held.close()
    left = {*copies()}
    assert {place in left for place in places[1:3]} == {False}
    assert left >= {places[0], places[3]}
    assert len(left) == 3
    locks[0].close()


def test_a_model_that_cant_be_read_is_bad_input(model):
    (model / "merges.txt").symlink_to("/proc/self/mem")
    with pytest.raises(BadInput, match=r"model .*: merges.txt can't be read: Input/output error"):
        find_digests(model)


def test_a_launcher_that_sends_nothing_is_not_waited_for_without_end(model, monkeypatch):
    late = type("GetTimeoutError", (Exception,), {})
    asked = []

    def get(answer, timeout=None):
        asked.append((answer, timeout))
        raise late

    errors = SimpleNamespace(GetTimeoutError=late, RayTaskError=type("RayTaskError", (Exception,), {}))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get, exceptions=errors))
    source = SimpleNamespace(piece=SimpleNamespace(remote=lambda *piece: piece))
    with pytest.raises(DeadlineError, match=r"has not sent /gone/config.json from byte 0 on within 300 s"):
        PlacedModel("/gone", find_digests(model), "here", source).hold("elsewhere")
    assert asked == [(("config.json", 0), ray_models.PIECE_S)]
