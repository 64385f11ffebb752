"""A checksum of a bucket's bytes that is fast enough for every sync: XXH3 in host memory, integer arithmetic in torch
on devices.

The tensors are in host memory on both ends, or on devices on both ends. Both kinds detect transfer errors (a changed
bit, swapped positions or tensors, bytes of another version). They do not protect against an attacker who computes
collisions.

On devices the bytes are read as 64-bit words. Within a chunk each word is folded, so that its high bits affect the low
bits, and multiplied by an odd pseudo-random weight that depends on its position. The products are added modulo 2^64.
The sums of the chunks, with each tensor's size and last bytes, are the coefficients of a polynomial modulo 2^64. A
bucket's are read from the device at once, since each read waits for the device.
"""

from __future__ import annotations

from itertools import islice

import torch
import xxhash
from torch import Tensor

CHUNK = 65536
"""Number of 8-byte words that are summed together: half a megabyte. Part of the checksum's definition."""

BLOCK = 128 * CHUNK
"""Number of words folded at a time. Each block takes a few kernels, and 64 MiB for the products."""

_MASK = 2**64 - 1
_BASE = 0x9E3779B97F4A7C15  # odd; the golden ratio's digits
_FOLD = 31

_weights_of: dict[torch.device, Tensor] = {}


def tensor_checksum(*tensors: Tensor) -> str:
    """Return the checksum of the tensors' bytes, one tensor after the other, each in row-major order, independent of
    shapes and dtypes.

    It has 32 hexadecimal digits (XXH3, 128 bits) for tensors in host memory, and 16 for tensors on a device.
    """
    if tensors[0].device.type != "cpu":
        return device_checksum(*tensors)
    found = xxhash.xxh3_128()
    for tensor in tensors:
        found.update(_bytes(tensor).numpy().data)
    return found.hexdigest()


def device_checksum(*tensors: Tensor) -> str:
    """Return the device checksum, computed where the tensors are."""
    sums = [_sums(_bytes(tensor)) for tensor in tensors]
    totals = iter(torch.cat(sums).tolist())
    value = 0
    for tensor, own in zip(tensors, sums, strict=True):
        value = value * _BASE + tensor.nbytes
        for total in islice(totals, len(own)):
            value = (value * _BASE + total) & _MASK
    return f"{_mixed(value):016x}"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _words(data: Tensor) -> Tensor:
    """Return the bytes as int64 words. They are copied if the memory is not aligned to words."""
    return (data if data.storage_offset() % 8 == 0 and data.data_ptr() % 8 == 0 else data.clone()).view(torch.int64)


def _sums(data: Tensor) -> Tensor:
    """Return int64 [chunks + 1]: the weighted sum of each chunk of the bytes, modulo 2^64, and the bytes that are left
    after the last whole word."""
    whole = data.numel() // 8 * 8
    words = _words(data[:whole])
    rest = torch.zeros(8, dtype=torch.uint8, device=data.device)
    rest[: data.numel() - whole] = data[whole:]
    weights = _weights(words.device)
    scratch = torch.empty(min(BLOCK, len(words)), dtype=torch.int64, device=words.device)
    sums = []
    for block in words.split(BLOCK) if len(words) else []:
        folded = scratch[: len(block)].copy_(block)
        folded >>= _FOLD  # torch_npu has a kernel for this operator, and none for bitwise_right_shift
        folded += block
        whole = len(block) // CHUNK * CHUNK
        # integers in products and sums wrap; `dot` and `mv` do not support integers on devices
        sums.append(folded[:whole].view(-1, CHUNK).mul_(weights).sum(1))
        if whole < len(block):
            sums.append(folded[whole:].mul_(weights[: len(block) - whole]).sum(0, keepdim=True))
    return torch.cat([*sums, rest.view(torch.int64)])


def _weights(device: torch.device) -> Tensor:
    """Return [CHUNK] odd numbers, the same on every device: splitmix64 of the position, computed with wrapping
    integers."""
    if device not in _weights_of:
        numbers = [_mixed((place * _BASE) & _MASK) | 1 for place in range(1, CHUNK + 1)]
        signed = [number - 2**64 if number >= 2**63 else number for number in numbers]
        _weights_of[device] = torch.tensor(signed, dtype=torch.int64, device=device)
    return _weights_of[device]


def _mixed(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every bit of the value affects every bit of the result."""
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
