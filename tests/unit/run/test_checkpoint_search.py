"""Which checkpoint a run resumes from, when some are damaged."""

import fsspec
import pytest

from engine.errors import CheckpointError
from engine.run import checkpoint_store as store
from engine.run.checkpoint_files import MARKER
from engine.run.checkpoint_store import newest_whole
from support.run_folders import a_checkpoint
from support.s3_server import s3_server


@pytest.fixture
def said():
    return []


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json"])
def test_the_newest_whole_one_is_taken_and_damaged_ones_are_named_and_kept(tmp_path, said, name):
    for step in (2, 4, 6):
        a_checkpoint(tmp_path, step)
    for step in (4, 6):
        flip(tmp_path / f"step-00000{step}" / name)
    content = (tmp_path / "step-000006" / name).read_bytes()
    assert newest_whole(tmp_path, "", "", said.append) == tmp_path / "step-000002"
    assert len(said) == 2
    for step, line in zip((6, 4), said, strict=True):
        assert f"step-00000{step}: {name} does not match _SUCCESS.json" in line
        assert line.endswith(f"skipped, and kept as damaged-step-00000{step}")
    assert (tmp_path / "damaged-step-000006" / name).read_bytes() == content
    said.clear()
    assert newest_whole(tmp_path, "", "", said.append) == tmp_path / "step-000002"
    assert said == []


def test_a_cut_file_too_and_the_same_step_may_be_damaged_again(tmp_path, said):
    a_checkpoint(tmp_path, 2)
    for _ in range(2):
        (a_checkpoint(tmp_path, 4) / "__0_0.distcp").write_bytes(b"")
        assert newest_whole(tmp_path, "", "", said.append) == tmp_path / "step-000002"
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-000002",
        "damaged-step-000004",
        "damaged-step-000004-2",
    }


def test_half_written_ones_are_ignored_and_named_and_interrupted_ones_stay(tmp_path, said):
    for step in (2, 4, 6, 8):
        a_checkpoint(tmp_path, step)
    (tmp_path / "step-000004/state.json").unlink()
    (tmp_path / "step-000006/__0_0.distcp").write_bytes(b"cut")
    (tmp_path / "step-000008" / MARKER).unlink()
    (tmp_path / ".step-000010.partial").mkdir()
    assert newest_whole(tmp_path, "", "", said.append) == tmp_path / "step-000002"
    assert said == [
        "checkpoint step-000004 is incomplete (state.json is missing), ignored",
        "checkpoint step-000006 is incomplete (__0_0.distcp has 3 bytes, _SUCCESS.json says 701), ignored",
        "checkpoint step-000008 is incomplete (no _SUCCESS.json), ignored",
        "checkpoint step-000010 is incomplete (no _SUCCESS.json), ignored",
    ]
    left = {"step-000002", "damaged-step-000004", "damaged-step-000006", "step-000008", ".step-000010.partial"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again_by_itself(tmp_path, said):
    flip(a_checkpoint(tmp_path, 2) / "__0_0.distcp")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"no checkpoint of this run is intact; to start again at step 0 "):
            newest_whole(tmp_path, "", "", said.append)


@pytest.fixture(params=["folder", "s3"])
def place(request, tmp_path):
    if request.param == "folder":
        yield str(tmp_path / "place")
        return
    with s3_server():
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket/run"


def test_a_damaged_one_of_the_place_is_kept_there_and_the_one_before_is_fetched(tmp_path, place, said):
    for step in (2, 4):
        checkpoint = a_checkpoint(tmp_path / "there", step)
        store.upload_checkpoint(checkpoint, f"{place}/{checkpoint.name}")
    files, root = fsspec.core.url_to_fs(place)
    path = f"{root}/step-000004/__0_0.distcp"
    data = bytearray(files.cat_file(path))
    data[3] ^= 1
    files.pipe_file(path, bytes(data))
    assert newest_whole(tmp_path / "here", place, "", said.append) == tmp_path / "here/step-000002"
    assert "step-000004: __0_0.distcp does not match" in said[0]
    assert said[0].endswith(f"skipped, and kept as {place}/damaged-step-000004")
    assert store.damaged_checkpoints(place) == ["damaged-step-000004"]
    assert list(store.survey_place(place)[0]) == ["step-000002"]


@pytest.mark.parametrize("size", [0, 100, 900, None], ids=["empty", "shorter", "longer", "missing"])
def test_a_file_of_the_wrong_size_in_the_place_is_damage_too(tmp_path, place, said, size):
    for step in (2, 4):
        checkpoint = a_checkpoint(tmp_path / "there", step)
        store.upload_checkpoint(checkpoint, f"{place}/{checkpoint.name}")
    files, root = fsspec.core.url_to_fs(place)
    path = f"{root}/step-000004/__0_0.distcp"
    if size is None:
        files.rm_file(path)
    else:
        files.pipe_file(path, b"w" * size)
    assert newest_whole(tmp_path / "here", place, "", said.append) == tmp_path / "here/step-000002"
    wrong = "is missing" if size is None else f"has {size} bytes, _SUCCESS.json says 701"
    aside = f"{place}/damaged-step-000004"
    assert said[0] == f"checkpoint {place}/step-000004: __0_0.distcp {wrong}; skipped, and kept as {aside}"
    assert store.damaged_checkpoints(place) == ["damaged-step-000004"]


def test_a_whole_copy_in_the_place_replaces_a_damaged_one(tmp_path, place, said):
    for step in (2, 4):
        checkpoint = a_checkpoint(tmp_path / "here", step)
        store.upload_checkpoint(checkpoint, f"{place}/{checkpoint.name}")
    flip(tmp_path / "here/step-000004/__0_0.distcp")
    assert newest_whole(tmp_path / "here", place, "", said.append) == tmp_path / "here/step-000004"
    assert said[-1] == f"checkpoint step-000004 comes from {place}"


def test_a_run_whose_only_checkpoint_in_the_place_is_cut_does_not_begin_again_by_itself(tmp_path, place, said):
    checkpoint = a_checkpoint(tmp_path / "there", 2)
    store.upload_checkpoint(checkpoint, f"{place}/{checkpoint.name}")
    files, root = fsspec.core.url_to_fs(place)
    files.pipe_file(f"{root}/step-000002/state.json", b"{")
    with pytest.raises(CheckpointError, match=r"no checkpoint of this run is intact; .*: .*/damaged-step-000002$"):
        newest_whole(tmp_path / "here", place, "", said.append)
    assert "step-000002: state.json has 1 bytes" in said[0]
