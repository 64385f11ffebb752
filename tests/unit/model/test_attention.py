import pytest
import torch

from engine.model.attention import by_segment, masked
from engine.model.layout import layout

CASES = {
    "ragged": [(5, [3, 7, 1])],
    "empty and equal": [(4, [6, 0, 6, 2])],
    "several groups": [(3, [2, 2]), (1, [5]), (7, [1, 4])],
    "one token": [(1, [1])],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_by_segment_equals_the_mask_and_its_gradients(case, heads):
    row = layout([([0] * prompt, [[0] * n for n in lengths]) for prompt, lengths in CASES[case]])
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads[0], row.size, 8), (heads[1], row.size, 8), (heads[1], row.size, 8)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    weight = torch.randn(heads[0], row.size, 8, generator=generator, dtype=torch.float64)
    results = []
    for attend in (masked, by_segment):
        out = attend(*inputs, row)
        results.append((out, *torch.autograd.grad((out * weight).sum(), inputs)))
    for reference, other in zip(*results, strict=True):
        torch.testing.assert_close(other, reference, rtol=1e-9, atol=1e-11)
