"""Rows for attention kernels, and the comparison of a kernel with the plain mask."""

import torch

from engine.model.kernels.reference import masked_attention
from engine.model.layout import make_layout

CASES = {
    "ragged": [(5, [3, 7, 1])],
    "empty and equal": [(4, [6, 0, 6, 2])],
    "several groups": [(3, [2, 2]), (1, [5]), (7, [1, 4])],
    "one token": [(1, [1])],
    "only empty": [(3, [0, 0])],
    "over several blocks": [(130, [140, 3, 0, 129]), (1, [1] * 8)],
}
HEADS = [(4, 4), (4, 2), (3, 1)]
"""(query heads, key-value heads)."""


def row_of(groups, shared=True):
    return make_layout([([0] * prompt, [[0] * n for n in lengths]) for prompt, lengths in groups], shared)


def shards_of(row):
    """The row as it is, and aligned and cut for two and three context-parallel ranks."""
    yield row
    for size in (2, 3):
        aligned = row.aligned(2 * size)
        yield from (aligned.shard(rank, size) for rank in range(size))


def results(kernel, row, heads, scale=None, dtype=torch.float64):
    """Output and gradients of q, k, v of seeded random inputs."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(row.size, heads[0], 16), (row.row_size, heads[1], 16), (row.row_size, heads[1], 16)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    inputs = [x.to(dtype).requires_grad_() for x in inputs]
    weight = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    out = kernel(*inputs, row, scale)
    return out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)


def assert_same(kernel, row, heads, scale=None):
    for found, expected in zip(
        results(kernel, row, heads, scale), results(masked_attention, row, heads, scale), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def assert_near_in_bfloat16(kernel, row, heads):
    """Output and gradients in bfloat16 are within 2⁻⁵ of the exact ones of about 1, eight roundings of a bfloat16."""
    pairs = zip(results(kernel, row, heads, dtype=torch.bfloat16), results(masked_attention, row, heads), strict=True)
    for found, exact in pairs:
        assert found.dtype is torch.bfloat16
        assert (found - exact).abs().max() <= 2**-5 * max(1, exact.abs().max())
