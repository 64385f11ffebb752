"""Folders of versions: one is whole at any time, and the room of the one before is used again."""

from pathlib import Path

import pytest
import torch

from engine.client.publish.transports import Snapshots
from engine.errors import BadInput
from engine.wire.sync_messages import BucketInfo
from engine.wire.weights.bucket_file import BucketFile, wire_of
from engine.wire.weights.buckets import Buffers, pack_buckets, specs_of


def write(snapshots, version, stage, tensors, limit=100):
    for bucket in pack_buckets(tensors.items(), None, limit, Buffers(9, 1.0)):
        info = BucketInfo(transport="file", version=version, stage=stage, bucket=bucket.number, **bucket.wire())
        snapshots.write_bucket(bucket, info)


def read(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = BucketFile(path)
        wire = wire_of(path)
        tensors = file.read_tensors(torch.empty(file.nbytes, dtype=torch.uint8), specs_of(wire))
        found |= zip(wire["names"], tensors, strict=True)
    return found


def visible(folder):
    return [path.name for path in folder.glob("version-????????")]


def test_versions_follow_each_other_however_many_buckets_they_have(tmp_path):
    snapshots = Snapshots(tmp_path, 1)
    for version, sizes in enumerate(([30, 20, 10], [5], [40, 40, 40, 40], [7, 8])):
        tensors = {f"t{i}": torch.full((size,), float(version)) for i, size in enumerate(sizes)}
        snapshots.begin_version(version)
        before = visible(tmp_path)
        write(snapshots, version, 0, tensors)
        assert visible(tmp_path) == before
        snapshots.stage_done(version, 0)
        assert visible(tmp_path) == [snapshots.place(version).name]
        found = read(snapshots.place(version))
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert len(list(tmp_path.iterdir())) == 2  # the whole one, and the room of the one before


@pytest.mark.parametrize("first", [0, 1])
def test_a_version_is_visible_once_all_stages_are_written(tmp_path, first):
    stages = [Snapshots(tmp_path, 2), Snapshots(tmp_path, 2)]
    for version in (0, 1, 2):
        stages[0].begin_version(version)
        for stage in (first, 1 - first):
            write(stages[stage], version, stage, {f"s{stage}": torch.ones(60) * version, f"n{stage}": torch.zeros(3)})
        stages[first].stage_done(version, first)
        assert visible(tmp_path) == ([f"version-{version - 1:08d}"] if version else [])
        stages[1 - first].stage_done(version, 1 - first)
        assert visible(tmp_path) == [f"version-{version:08d}"]
        assert read(stages[0].place(version)).keys() == {"s0", "n0", "s1", "n1"}


def test_another_stage_may_put_the_version_in_its_place_between_mark_and_look(tmp_path, monkeypatch):
    stages = [Snapshots(tmp_path, 2), Snapshots(tmp_path, 2)]
    stages[0].begin_version(0)
    for stage in (0, 1):
        write(stages[stage], 0, stage, {f"s{stage}": torch.ones(60)})
    (stages[0].place(0).with_suffix(".partial") / "stage-000.done").touch()
    glob = Path.glob
    looked = []

    def late(path, pattern):
        if pattern == "*.done" and not looked:
            looked.append(path)
            stages[1].stage_done(0, 1)
            raise FileNotFoundError(path)  # as pathlib does where a folder goes while it is read
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", late)
    stages[0].stage_done(0, 0)
    assert visible(tmp_path) == ["version-00000000"]
    assert read(stages[0].place(0)).keys() == {"s0", "s1"}


def test_a_failed_attempt_and_a_version_that_comes_again_leave_nothing_behind(tmp_path):
    snapshots = Snapshots(tmp_path, 1)
    snapshots.begin_version(4)
    write(snapshots, 4, 0, {f"t{i}": torch.ones(30) for i in range(3)})
    for _ in range(2):
        snapshots.begin_version(4)
        write(snapshots, 4, 0, {"t": torch.ones(3)})
        snapshots.stage_done(4, 0)
        assert read(snapshots.place(4)).keys() == {"t"}
    with pytest.raises(BadInput, match="cannot be read"):
        wire_of(tmp_path / "version-00000004" / "absent")
