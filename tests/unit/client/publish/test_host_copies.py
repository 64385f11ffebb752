"""Copies of versions in host memory: what is written from them is one version, whatever comes in between."""

import itertools
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.client.publish.host_copies import HostCopies
from engine.client.publish.transports import Snapshots
from engine.wire.sync_messages import BucketInfo
from engine.wire.weights import bucket_file
from engine.wire.weights.bucket_file import BucketFile, wire_of
from engine.wire.weights.buckets import Buffers, pack_buckets, specs_of
from support.runs import wait_for

CPU = torch.device("cpu")
SIZES = (30, 20, 25, 7)
ACTIONS = st.sampled_from(
    ["version", "version", "attempt that fails", "forgotten", "asked", "files stall", "files go on"]
)


def copy(copies, version, count=4):
    """Copy the first buckets of a version, one for each tensor, whose memory is used again at once."""
    tensors = {f"t{number}": torch.full((size,), float(version)) for number, size in enumerate(SIZES)}
    for bucket in itertools.islice(pack_buckets(tensors.items(), None, 1, Buffers(9, 1.0)), count):
        info = BucketInfo(transport="gloo", version=version, stage=0, bucket=bucket.number, **bucket.wire())
        copies.copy(bucket, info)
        bucket.tensors[0].fill_(-1.0)


def read(folder):
    """All values in a snapshot's files."""
    for path in sorted(folder.glob("*.safetensors")):
        file = BucketFile(path)
        for tensor in file.read_tensors(torch.empty(file.nbytes, dtype=torch.uint8), specs_of(wire_of(path))):
            yield from tensor.tolist()


class Stand:
    """Copies, with an orchestrator that can be made to ask for a snapshot, and files that can be made to wait."""

    def __init__(self, folder, patch):
        self.snapshots = Snapshots(folder, 1)
        self.wanted = threading.Event()
        self.may_write = threading.Event()
        self.over = False
        self.memory = 0
        """Bytes that the copies have taken; they keep them."""
        self._write = bucket_file.write_bucket
        self._empty = torch.empty
        patch.setattr(bucket_file, "write_bucket", self.write)
        patch.setattr(torch, "empty", self.empty)
        self.copies = HostCopies(0, self.snapshots, self.is_wanted, CPU)

    def is_wanted(self, version):
        found = self.wanted.wait(0.01)
        if self.over:
            raise SystemExit  # ends the thread
        return found

    def write(self, *arguments):
        assert self.may_write.wait(20)
        self._write(*arguments)

    def empty(self, *sizes, **options):
        self.memory += sizes[0] if "pin_memory" in options else 0
        return self._empty(*sizes, **options)


@given(actions=st.lists(ACTIONS, max_size=12))
def test_whatever_comes_a_snapshot_is_the_newest_version_and_the_memory_is_bounded(tmp_path_factory, actions):
    newest = None
    version = 0
    with pytest.MonkeyPatch.context() as patch:
        made = Stand(tmp_path_factory.mktemp("copies"), patch)
        for action in actions:
            if action == "version":
                version += 1
                copy(made.copies, version)
                made.copies.complete_version(version)
                newest = version
            elif action == "attempt that fails":
                copy(made.copies, version + 1, count=2)
            elif action == "forgotten":
                made.copies.free_version()
                newest = None
            elif action == "asked":
                made.wanted.set()
            elif action == "files stall":
                made.may_write.clear()
            else:
                made.may_write.set()
        made.wanted.set()
        made.may_write.set()
        if newest is not None:
            wait_for(made.snapshots.place(newest).is_dir, "the snapshot", timeout_s=20)
            assert list(read(made.snapshots.place(newest))) == [newest] * sum(SIZES)
        made.over = True
    assert made.memory <= 3 * 4 * sum(SIZES)
