"""Transport "file": each bucket is a file, which the next version overwrites."""

from pathlib import Path

import pytest
import torch

from engine.client.publish.transports import FileTransport
from engine.errors import MetronomeError
from engine.wire.messages import BucketInfo
from engine.wire.weights.bucket_file import BucketFile
from engine.wire.weights.buckets import Buffers, pack_buckets


def write(transport, version, stage, sizes):
    tensors = {f"s{stage}t{number}": torch.full((size,), float(version)) for number, size in enumerate(sizes)}
    for bucket in pack_buckets(tensors.items(), None, 100, Buffers(9, 1.0)):
        info = BucketInfo(transport="file", version=version, stage=stage, bucket=bucket.number, **bucket.wire())
        transport.write(bucket, info)
        file = BucketFile(Path(info.path))
        found = file.read_tensors(torch.empty(file.nbytes, dtype=torch.uint8), bucket.specs)
        assert all(torch.equal(tensors[spec.name], one) for spec, one in zip(bucket.specs, found, strict=True))


def test_versions_follow_each_other_in_the_same_files_whatever_their_size(tmp_path):
    transport = FileTransport(tmp_path / "weights")
    for version, sizes in enumerate(([30, 20, 10], [40, 40, 5], [7, 8, 9])):
        for stage in (0, 1):
            write(transport, version, stage, sizes)
    assert {file.name[:9] for file in (tmp_path / "weights").iterdir()} == {"stage-000", "stage-001"}


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "weights").write_text("no folder")
    with pytest.raises(MetronomeError, match=r"weights/stage-000-bucket-00000.safetensors: weights could not be"):
        write(FileTransport(tmp_path / "weights"), 0, 0, [3])
