"""Every single change that can happen in transit must show."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire.weights.checksum import BLOCK, CHUNK, device_checksum, tensor_checksum

EITHER = pytest.mark.parametrize("checksum", [tensor_checksum, device_checksum])

SIZES = st.integers(1, 3 * CHUNK // 1000) | st.sampled_from([8 * CHUNK - 3, 8 * CHUNK, 8 * CHUNK + 5, 20 * CHUNK])


def noise(size, seed):
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@EITHER
@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(0, 2**32), st.data())
def test_a_changed_bit_changes_it(checksum, size, seed, data):
    one = noise(size, seed)
    other = one.clone()
    other[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(one) != checksum(other)


@EITHER
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.data())
def test_elements_that_change_places_change_it_also_if_they_differ_in_their_sign_only(checksum, seed, data):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
    a, b = data.draw(st.lists(st.integers(0, 999), min_size=2, max_size=2, unique=True))
    if data.draw(st.booleans()):
        values[b] = -values[a]
    swapped = values.clone()
    swapped[[a, b]] = values[[b, a]]
    assert checksum(values) != checksum(swapped)


@EITHER
def test_chunks_that_change_places_change_it(checksum):
    chunks = noise(5 * 8 * CHUNK, 0).view(5, -1)
    found = {checksum(chunks[order]) for order in ([0, 1, 2, 3, 4], [1, 0, 2, 3, 4], [0, 1, 2, 4, 3], [4, 1, 2, 3, 0])}
    assert len(found) == 4


@EITHER
@pytest.mark.parametrize("fill", [0, 255])
def test_lengths_count(checksum, fill):
    found = {checksum(torch.full((size,), fill, dtype=torch.uint8)) for size in range(40)}
    assert len(found) == 40


@EITHER
@given(st.integers(1, 200), st.integers(0, 2**32))
def test_bytes_count_and_not_how_they_are_seen(checksum, size, seed):
    data = noise(8 * size, seed)
    seen = [data, data.view(torch.int16), data.view(torch.bfloat16), data.view(torch.float32), data.view(size, 8)]
    assert len({checksum(tensor) for tensor in seen}) == 1


@EITHER
def test_a_tensor_that_begins_anywhere_or_is_not_contiguous_has_the_checksum_of_its_values(checksum):
    data = noise(4003, 1)
    assert checksum(data[3:]) == checksum(data[3:].clone())
    matrix = torch.randn(40, 30)
    assert checksum(matrix.T) == checksum(matrix.T.contiguous()) != checksum(matrix)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "0000000000000000"),
        (1, "e220a8397b1dcdaf"),
        (7, "c3bd4aaa9181fb5b"),
        (8, "f8af8fa27dc2187c"),
        (4003, "41572b9e17357759"),
        (8 * CHUNK - 3, "3678da1efb0a8390"),
        (8 * CHUNK, "9340d94fbc04f289"),
        (8 * CHUNK + 5, "6e42908c467e4927"),
        (8 * (2 * CHUNK + 9) + 1, "f9a2c9226149cfce"),
        (8 * (BLOCK + CHUNK) + 11, "f5c62d6aa7a50462"),
    ],
)
def test_its_values_are_pinned(size, expected):
    """Those of the plain rule, computed chunk by chunk."""
    assert device_checksum((torch.arange(size) * 2654435761 >> 7).to(torch.uint8)) == expected


def test_a_block_takes_a_few_kernels():
    """On a device each operation is a kernel: 64 MiB, 128 chunks, may not take one for each chunk."""
    words = torch.zeros(2 * BLOCK, dtype=torch.int64)
    device_checksum(words[:CHUNK])  # computes the weights once
    with torch.profiler.profile() as profile:
        device_checksum(words)
    assert sum(event.count for event in profile.key_averages()) < 100
