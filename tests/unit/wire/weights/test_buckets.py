"""Buckets of named tensors, in memory and as files."""

import itertools
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.errors import BadInput, DeadlineError
from engine.wire.weights import bucket_file
from engine.wire.weights.bucket_file import BucketFile
from engine.wire.weights.buckets import FIRST, Buffers, pack_buckets, specs_of
from engine.wire.weights.checksum import device_checksum, tensor_checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=12)


def named(shapes, dtypes=DTYPES):
    generator = torch.Generator().manual_seed(0)
    return {
        f"t{i}": torch.randn(shape, generator=generator).to(dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)
    }


@settings(deadline=None)
@given(SHAPES, st.integers(1, 400))
def test_every_tensor_is_in_exactly_one_bucket_of_bounded_size(shapes, limit):
    tensors = named(shapes)
    buffers = Buffers(1, 1.0)
    found = {}
    for bucket in pack_buckets(tensors.items(), None, limit, buffers):
        assert sum(len(piece) for piece in bucket.pieces()) <= limit or len(bucket.specs) == 1
        wire = bucket.wire()
        assert specs_of(wire) == bucket.specs
        assert wire["checksum"] == tensor_checksum(torch.cat(bucket.pieces()))
        for spec, tensor in zip(bucket.specs, bucket.tensors, strict=True):
            assert spec.name not in found
            found[spec.name] = tensor.clone()
        buffers.give_back(bucket.buffer)
    assert sorted(found) == sorted(tensors)
    assert all(found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in tensors.items())


def test_tensors_are_cast_to_the_instances_dtype_and_transposed_ones_written_row_by_row():
    tensors = {"a": torch.randn(5, 3).T, "b": torch.randn(7)}
    (bucket,) = pack_buckets(tensors.items(), torch.bfloat16, 1000, Buffers(1, 1.0))
    assert all(
        torch.equal(found, tensors[spec.name].bfloat16())
        for spec, found in zip(bucket.specs, bucket.tensors, strict=True)
    )
    with pytest.raises(BadInput, match=r"b is torch.int64; weights travel as"):
        list(pack_buckets({"b": torch.arange(3)}.items(), None, 1000, Buffers(1, 1.0)))


def test_memory_is_used_again_and_bounded():
    buffers = Buffers(2, 0.05)
    one = buffers.take_buffer(100)
    two = buffers.take_buffer(10)
    with pytest.raises(DeadlineError, match="no bucket of weights was sent in"):
        buffers.take_buffer(1)
    buffers.give_back(one)
    buffers.give_back(two)
    assert buffers.take_buffer(10).data_ptr() == two.data_ptr()
    assert buffers.take_buffer(90).data_ptr() == one.data_ptr()
    buffers.give_back(one)
    assert len(buffers.take_buffer(300)) == 300


@settings(deadline=None, max_examples=30)
@given(SHAPES)
def test_a_file_is_safetensors(tmp_path_factory, shapes):
    path = tmp_path_factory.mktemp("bucket") / "bucket.safetensors"
    tensors = named(shapes)
    (bucket,) = pack_buckets(tensors.items(), None, 10**6, Buffers(1, 1.0))
    wire = bucket.wire()
    bucket_file.write_bucket(path, bucket)
    if all(tensor.numel() for tensor in tensors.values()):  # load_file itself stumbles over empty tensors at odd places
        loaded = load_file(path)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    file = BucketFile(path)
    buffer = torch.empty(file.nbytes, dtype=torch.uint8)
    for spec, tensor in zip(specs_of(wire), file.read_tensors(buffer, specs_of(wire)), strict=True):
        assert torch.equal(tensor, tensors[spec.name])


def test_what_is_no_bucket_is_refused_by_its_path(tmp_path):
    save_file({"a": torch.zeros(3)}, tmp_path / "plain.safetensors")
    assert BucketFile(tmp_path / "plain.safetensors").names == {"a"}
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        BucketFile(tmp_path / "absent")
    for name, content in (
        ("short", b"123"),
        ("huge", b"\xff" * 20),
        ("list", b"\x02" + bytes(7) + b"[]"),
        ("cut", (tmp_path / "plain.safetensors").read_bytes()[:-1]),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadInput, match=f"{name}: not a"):
            BucketFile(tmp_path / name)
    with safe_open(tmp_path / "plain.safetensors", "pt") as file:
        assert file.metadata() is None


WIRE = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]]}


@pytest.mark.parametrize(
    "change",
    [
        {"names": "a"},
        {"names": []},
        {"names": ["a", "a"], "dtypes": ["float32"] * 2, "shapes": [[1]] * 2},
        {"names": [1]},
        {"dtypes": ["int8"]},
        {"dtypes": [["float32"]]},
        {"shapes": [[-1]]},
        {"shapes": [[1.5]]},
        {"shapes": [[True]]},
        {"shapes": ["2"]},
        {"shapes": [[2**30, 2**30]]},
        {"shapes": [[1] * 9]},
        {"shapes": [[1], [2]]},
        {"dtypes": None},
    ],
)
def test_a_malformed_description_is_refused(change):
    assert specs_of(WIRE)
    with pytest.raises(BadInput, match="update_info"):
        specs_of(WIRE | change)


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ([200, 4, 300, 4], ["1", "023"]),
        ([100, 4, 300], ["0", "12"]),
        ([50, 40, 20, 700, 100], ["01", "23", "4"]),
        ([200, 300, 4], ["0", "12"]),
        ([900, 900, 4], ["0", "1", "2"]),
        ([200], ["0"]),
        ([], []),
    ],
)
def test_the_first_bucket_is_small_and_a_large_first_tensor_lets_a_smaller_one_go_before_it(sizes, found):
    tensors = {str(number): torch.empty(size // 4) for number, size in enumerate(sizes)}
    buckets = pack_buckets(tensors.items(), None, 100 * FIRST, Buffers(9, 1.0))
    assert ["".join(spec.name for spec in bucket.specs) for bucket in buckets] == found


def test_tensors_that_change_places_change_the_checksum():
    """Tensors of one shape: nothing but the checksum tells them apart."""
    tensors = named([[3, 4]] * 3, [torch.float32])
    found = set()
    for order in itertools.permutations(tensors.values()):
        (bucket,) = pack_buckets(zip(tensors, order, strict=True), None, 10_000, Buffers(1, 1.0))
        found |= {bucket.wire()["checksum"], device_checksum(*bucket.tensors)}
    assert len(found) == 2 * 6


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    with pytest.raises(BadInput, match="cannot be read: not a regular file"):
        BucketFile(pipe)


def test_a_file_that_is_written_over_a_longer_one_is_no_longer_than_a_new_one(tmp_path):
    for name, shapes in (("again", [[9, 9], [7]]), ("again", [[3]]), ("new", [[3]])):
        (bucket,) = pack_buckets(named(shapes).items(), None, 10_000, Buffers(1, 1.0))
        bucket_file.write_bucket(tmp_path / name, bucket)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "new").read_bytes()
    assert torch.equal(load_file(tmp_path / "again")["t0"], named([[3]])["t0"])
