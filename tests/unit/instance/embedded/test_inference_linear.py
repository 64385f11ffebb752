"""The linear maps of decoding: right, and row by row, which is what deterministic rollouts rest on."""

import pytest
import torch

from engine.instance.embedded.rollout_model import ROWS, onednn_available, onednn_linear

SIZES = [(128, 1024), (48, 61), (80, 48), (17, 3), (512, 128)]


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
def test_a_row_depends_neither_on_the_others_nor_on_its_place(sizes, rows):
    torch.manual_seed(0)
    x = torch.randn(rows, sizes[0])
    weight = torch.randn(*sizes[::-1])
    with torch.inference_mode():
        row = onednn_linear(x, weight, None)[5]
        for place in range(rows):
            other = torch.randn(rows, sizes[0])
            other[place] = x[5]
            assert torch.equal(onednn_linear(other, weight, None)[place], row)


def test_rows_of_a_fused_weight_are_read_where_they_lie():
    """Projections are computed as one over a joint weight; parts of it are views that start inside it."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, 32)
    joint = torch.randn(96, 32)
    with torch.inference_mode():
        torch.testing.assert_close(onednn_linear(x, joint[40:72], None), x @ joint[40:72].T, rtol=1e-5, atol=1e-5)
        joint[50] = 0.0
        assert onednn_linear(x, joint[40:72], None)[:, 10].abs().max() == 0.0
