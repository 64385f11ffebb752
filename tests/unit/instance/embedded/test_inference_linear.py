"""The linear maps of decoding: right, and row by row, which is what deterministic rollouts rest on."""

import pytest
import torch
from torch import nn

from engine.instance.embedded.rollout_model import ROWS, Linear, onednn_available, onednn_linear
from support.sent import BF16

SIZES = [(128, 1024), (48, 61), (80, 48), (17, 3), (512, 128)]


def linear_of(weight):
    part = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    part.weight = nn.Parameter(weight, requires_grad=False)
    return Linear(part)


@pytest.fixture(params=[1, 2])
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def test_this_torch_has_the_operator():
    assert onednn_available()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rows", [1, ROWS - 1, ROWS, 110])
@pytest.mark.parametrize("biased", [False, True])
def test_equals_the_product_in_fp64(sizes, rows, biased):
    torch.manual_seed(rows)
    x = torch.randn(rows, sizes[0])
    weight = torch.randn(*sizes[::-1])
    bias = torch.randn(sizes[1]) if biased else None
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0.0)
    with torch.inference_mode():
        found = onednn_linear(x, weight, bias)
    assert torch.norm(found - expected) < 1e-6 * torch.norm(expected)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rows", [ROWS, ROWS + 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_row_depends_neither_on_the_others_nor_on_its_place(sizes, rows, dtype):
    torch.manual_seed(0)
    x = torch.randn(rows, sizes[0])
    linear = linear_of(torch.randn(*sizes[::-1]).to(dtype))
    with torch.inference_mode():
        row = linear.in_fp32(x)[5]
        for place in range(rows):
            other = torch.randn(rows, sizes[0])
            other[place] = x[5]
            assert torch.equal(linear.in_fp32(other)[place], row)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rows", [1, ROWS - 1, ROWS, 110])
@pytest.mark.parametrize("dtype", [BF16])
def test_products_in_bf16_are_rounded_once_and_in_fp32_not_at_all(sizes, rows, dtype):
    torch.manual_seed(rows)
    x = torch.randn(rows, sizes[0]).to(dtype)
    weight = torch.randn(*sizes[::-1]).to(dtype)
    exact = x.double() @ weight.double().T
    with torch.inference_mode():
        linear = linear_of(weight)
        assert torch.norm(linear(x) - exact) < 2**-9 * torch.norm(exact)  # a rounding changes a value by up to 2⁻⁹
        assert torch.norm(linear.in_fp32(x.float()) - exact) < 2**-16 * torch.norm(exact)


def test_rows_of_a_fused_weight_are_read_where_they_lie():
    """Projections are computed as one over a joint weight; parts of it are views that start inside it."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, 32)
    joint = torch.randn(96, 32)
    with torch.inference_mode():
        torch.testing.assert_close(onednn_linear(x, joint[40:72], None), x @ joint[40:72].T, rtol=1e-5, atol=1e-5)
        joint[50] = 0.0
        assert onednn_linear(x, joint[40:72], None)[:, 10].abs().max() == 0.0
