"""A checksum of a tensor's bytes, fast enough for every sync: XXH3 in host memory, integer arithmetic in torch on
devices.

The receiver computes the kind that the sender announced: a transport's tensors lie in host memory on both ends, or on
devices on both, but a late instance reads into host memory, from a snapshot, also what was sent between devices. Both
kinds find what goes wrong in transit (a changed bit, places exchanged, bytes of another version); they are no defence
against somebody who computes collisions.

On devices the bytes are read as 64-bit words. Within a chunk each word is folded (so that its high bits count in the
low ones) and multiplied by an odd pseudo-random weight of its place; the products are added modulo 2^64, and the
chunks' sums are the coefficients of a polynomial modulo 2^64.
"""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

CHUNK = 65536
"""Words of 8 bytes that are summed together: half a megabyte, which stays in a core's cache."""

DEVICE_DIGITS = 16
"""Of a device's checksum; XXH3's has twice as many."""

_MASK = 2**64 - 1
_BASE = 0x9E3779B97F4A7C15  # odd; the golden ratio's digits
_FOLD = 31

_weights_of: dict[torch.device, Tensor] = {}


def checksum(tensor: Tensor) -> str:
    """Of the tensor's bytes in row-major order; shape and dtype do not count. 32 hexadecimal digits (XXH3, 128 bits) of
    one in host memory, 16 of one on a device."""
    data = _bytes(tensor)
    return xxhash.xxh3_128_hexdigest(data.numpy().data) if data.device.type == "cpu" else device_checksum(tensor)


def checksum_as(announced: object, tensor: Tensor) -> str:
    """The tensor's checksum, of the kind that was announced: a device's for one of 16 digits, else `checksum`."""
    device = isinstance(announced, str) and len(announced) == DEVICE_DIGITS
    return device_checksum(tensor) if device else checksum(tensor)


def device_checksum(tensor: Tensor) -> str:
    """What `checksum` is on a device, computed where the tensor is."""
    data = _bytes(tensor)
    whole = data.numel() // 8 * 8
    words = _words(data[:whole])
    value = data.numel()
    for total in _sums(words) if len(words) else []:
        value = (value * _BASE + total) & _MASK
    rest = int.from_bytes(data[whole:].cpu().numpy().tobytes(), "little")
    return f"{_mixed((value * _BASE + rest) & _MASK):0{DEVICE_DIGITS}x}"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _words(data: Tensor) -> Tensor:
    """As int64; a copy where the memory does not begin at a word."""
    return (data if data.storage_offset() % 8 == 0 and data.data_ptr() % 8 == 0 else data.clone()).view(torch.int64)


def _sums(words: Tensor) -> list[int]:
    """The weighted sum of each chunk, modulo 2^64."""
    weights = _weights(words.device)
    folded = torch.empty(min(CHUNK, len(words)), dtype=torch.int64, device=words.device)
    sums = []
    for chunk in words.split(CHUNK):
        part = folded[: len(chunk)]
        torch.bitwise_right_shift(chunk, _FOLD, out=part)
        part.add_(chunk)
        sums.append(_dot(part, weights[: len(chunk)]))
    return [total & _MASK for total in torch.stack(sums).tolist()]


def _dot(folded: Tensor, weights: Tensor) -> Tensor:
    """A wrapping sum of products; `dot` does no integers on devices."""
    return torch.dot(folded, weights) if folded.device.type == "cpu" else folded.mul_(weights).sum()


def _weights(device: torch.device) -> Tensor:
    """[CHUNK] odd numbers, the same everywhere: splitmix64 of the place, computed with wrapping integers."""
    if device not in _weights_of:
        numbers = [_mixed((place * _BASE) & _MASK) | 1 for place in range(1, CHUNK + 1)]
        signed = [number - 2**64 if number >= 2**63 else number for number in numbers]
        _weights_of[device] = torch.tensor(signed, dtype=torch.int64, device=device)
    return _weights_of[device]


def _mixed(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every bit of the value moves every bit of the result."""
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
