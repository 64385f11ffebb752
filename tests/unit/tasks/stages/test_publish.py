import itertools
import json

import fsspec
import pytest

from engine.errors import MetronomeError, TakenOver
from engine.run import checkpoint_store as store
from engine.run.checkpoint_files import folder_of, is_complete, partial_of, publish_checkpoint
from engine.run.files import seal
from support.run_folders import newer_attempt
from support.s3_server import s3_server
from tasks.stages.publish import copy_checkpoint


def a_checkpoint(root, step, **figures):
    folder = folder_of(root, step)
    partial = partial_of(folder)
    partial.mkdir(parents=True)
    (partial / "__0_0.distcp").write_bytes(b"weights" * 1000)
    (partial / ".metadata").write_bytes(b"index")
    (partial / "state.json").write_text(json.dumps({"step": step}))
    publish_checkpoint(partial=partial, target=folder, step=step, figures=figures)
    return folder


@pytest.fixture
def made(tmp_path):
    """A complete checkpoint and a policy folder."""
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "model.safetensors").write_bytes(b"hf" * 500)
    return a_checkpoint(tmp_path, 2), policy


@pytest.fixture(params=["folder", "s3"])
def place(request, tmp_path):
    """Where to publish, empty."""
    return f"{tmp_path}/out" if request.param == "folder" else f"{request.getfixturevalue('s3')}/{tmp_path.name}"


@pytest.fixture(scope="module")
def s3():
    """A real S3 endpoint on loopback with one bucket; its URL."""
    with s3_server():
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket/runs"


def published(place):
    """The marker, and the size of each file under a place."""
    store, root = fsspec.core.url_to_fs(place)
    store.invalidate_cache()
    sizes = {name.removeprefix(f"{root}/"): store.size(name) for name in store.find(root)}
    return json.loads(store.cat_file(f"{root}/_SUCCESS.json")), sizes


def test_a_published_checkpoint_is_whole(made, place):
    copy_checkpoint(*made, place)
    copy_checkpoint(*made, place)  # again over the first
    marker, sizes = published(place)
    assert marker["step"] == 2
    assert marker["files"]["policy/model.safetensors"] == 1000
    assert {name: size for name, size in sizes.items() if name != "_SUCCESS.json"} == marker["files"]


def test_what_the_trainer_has_published_is_not_sent_again(made, place):
    checkpoint, policy = made
    store.upload_checkpoint(checkpoint, place)
    (checkpoint / "__0_0.distcp").write_bytes(b"changed" * 1000)
    copy_checkpoint(checkpoint, policy, place)
    files, root = fsspec.core.url_to_fs(place)
    assert files.cat_file(f"{root}/__0_0.distcp") == b"weights" * 1000
    assert files.cat_file(f"{root}/policy/model.safetensors") == b"hf" * 500
    marker, _ = published(place)
    (checkpoint / "_SUCCESS.json").write_text(
        json.dumps(seal(marker | {"id": "of another run", "files": {"__0_0.distcp": 7000}}))
    )
    copy_checkpoint(checkpoint, policy, place)
    assert files.cat_file(f"{root}/__0_0.distcp") == b"changed" * 1000


@pytest.mark.parametrize("change", range(7))
def test_a_orchestrator_that_was_taken_over_uploads_nothing_more(made, place, tmp_path, change):
    """Before any of its changes there: the old marker, five files, the new marker."""
    checkpoint, policy = made
    copy_checkpoint(checkpoint, policy, place)
    (checkpoint / "__0_0.distcp").write_bytes(b"another" * 1000)
    marker = json.loads((checkpoint / "_SUCCESS.json").read_text())
    (checkpoint / "_SUCCESS.json").write_text(json.dumps(seal({**marker, "id": "another"})))
    fence = newer_attempt(tmp_path)
    calls = itertools.count()

    def check():
        if next(calls) == change:
            newer_attempt(tmp_path)
        fence.check_attempt()

    if change == 6:
        copy_checkpoint(checkpoint, policy, place, check)
        assert next(calls) == 6
        return
    with pytest.raises(TakenOver):
        copy_checkpoint(checkpoint, policy, place, check)
    files, root = fsspec.core.url_to_fs(place)
    files.invalidate_cache()
    found = store._marker(files, root)
    assert (found and found["id"]) == (marker["id"] if change == 0 else None)


def test_the_newest_whole_one_is_found_fetched_and_the_last_and_best_are_kept(place, tmp_path):
    for step in (2, 4, 6, 8, 10):
        store.upload_checkpoint(a_checkpoint(tmp_path / "run", step), f"{place}/step-{step:06d}")
    files, root = fsspec.core.url_to_fs(place)
    files.rm_file(f"{root}/step-000010/_SUCCESS.json")
    files.pipe_file(f"{root}/step-000008/state.json", b"{}")
    found, damaged, interrupted = store.survey_place(place)
    assert sorted(found) == ["step-000002", "step-000004", "step-000006"]
    assert damaged == {"step-000008": "state.json has 2 bytes, _SUCCESS.json says 11"}
    assert interrupted == {"step-000010": "no _SUCCESS.json"}
    fetched = store.download_checkpoint(place, "step-000006", found["step-000006"], tmp_path / "fetched")
    assert is_complete(fetched)
    assert (fetched / "__0_0.distcp").read_bytes() == b"weights" * 1000
    store.prune_published(place, 1, 1, {2: 0.9, 4: 0.1, 6: 0.2})
    assert sorted(store.survey_place(place)[0]) == ["step-000002", "step-000006"]
    assert not [name for name in files.find(root) if "step-000004" in name]


def test_a_fetched_checkpoint_stays_in_its_folder_and_has_the_right_sizes(made, place, tmp_path):
    copy_checkpoint(*made, f"{place}/step-000002")
    marker = store.survey_place(place)[0]["step-000002"]
    (tmp_path / "a/.step-000002.partial").mkdir(parents=True)
    (tmp_path / "a/.step-000002.partial/written-00000.json").touch()  # of a save that was killed
    fetched = store.download_checkpoint(place, "step-000002", marker, tmp_path / "a")
    assert sorted(path.name for path in fetched.iterdir()) == [
        ".metadata",
        "_SUCCESS.json",
        "__0_0.distcp",
        "state.json",
    ]
    outside = {"files": marker["files"] | {"../../escaped": 11}}
    store.download_checkpoint(place, "step-000002", marker | outside, tmp_path / "b")
    assert not list(tmp_path.rglob("escaped"))
    with pytest.raises(MetronomeError, match=r"step-000002 failed: state.json has 11 bytes, _SUCCESS.json says 12"):
        store.download_checkpoint(
            place, "step-000002", marker | {"files": marker["files"] | {"state.json": 12}}, tmp_path / "c"
        )
    assert not is_complete(tmp_path / "c/step-000002")


def test_a_bucket_that_is_not_there_is_named(made, s3):
    with pytest.raises(MetronomeError, match="s3://nowhere/x"):
        copy_checkpoint(*made, "s3://nowhere/x")


def test_an_incomplete_checkpoint_is_not_published(made, tmp_path):
    checkpoint, policy = made
    (checkpoint / "_SUCCESS.json").unlink()
    with pytest.raises(MetronomeError, match="is not complete"):
        copy_checkpoint(checkpoint, policy, f"{tmp_path}/out")
    assert not (tmp_path / "out").exists()
