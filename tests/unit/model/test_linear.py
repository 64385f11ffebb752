"""Linear layers' products against double precision, by both libraries; gradients into main_grad; equal bits."""

import pytest
import torch

from engine.model import linear as products
from engine.model.linear import linear_product

SIZES = [(37, 16, 48), (300, 384, 128), (900, 128, 768)]
"""Tokens, inputs, outputs; the last two take a weight's gradient each way."""


def computed(x, weight, bias, upstream):
    out = linear_product(x, weight, bias, allreduce_dgrad=False, sequence_parallel=False, tp_group=None)
    return out, *torch.autograd.grad((out * upstream).sum(), [part for part in (x, weight, bias) if part is not None])


def made(tokens, inputs, outputs, bias=True):
    torch.manual_seed(0)
    shapes = [(tokens, 1, inputs), (outputs, inputs), *([(outputs,)] if bias else [])]
    parts = [torch.randn(shape, requires_grad=True) for shape in shapes]
    return parts if bias else [*parts, None]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("large", [1, 1 << 60])
def test_values_and_gradients_by_both_libraries(monkeypatch, size, bias, large):
    monkeypatch.setattr(products, "LARGE", large)
    parts = made(*size, bias)
    upstream = torch.randn(size[0], 1, size[2])
    double = [None if part is None else part.detach().double().requires_grad_() for part in parts]
    exact = double[0] @ double[1].t() + (double[2] if bias else 0)
    wanted = exact, *torch.autograd.grad((exact * upstream).sum(), [part for part in double if part is not None])
    for ours, theirs in zip(computed(*parts, upstream), wanted, strict=True):
        assert ours.shape == theirs.shape
        assert torch.norm(ours - theirs) / torch.norm(theirs) < 1e-6


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("large", [1, 1 << 60])
def test_a_weights_gradient_is_added_to_its_main_grad(monkeypatch, size, large):
    monkeypatch.setattr(products, "LARGE", large)
    x, weight, _ = made(*size, bias=False)
    upstream = torch.randn(size[0], 1, size[2])
    _, _, wanted = computed(x, weight, None, upstream)
    weight.main_grad = before = torch.randn_like(weight)
    total = before.clone() + 2 * wanted
    for _ in range(2):
        out = linear_product(x, weight, None, allreduce_dgrad=False, sequence_parallel=False, tp_group=None)
        (out * upstream).sum().backward()
    assert weight.grad is None
    assert weight.main_grad is before
    torch.testing.assert_close(before, total, rtol=1e-5, atol=1e-4)


def test_a_bfloat16_weights_gradient_is_added_to_its_fp32_main_grad(monkeypatch):
    monkeypatch.setattr(products, "PIECE", 5000)  # more than one piece, the last one shorter
    x, weight, _ = made(300, 384, 128, bias=False)
    upstream = torch.randn(300, 1, 128).bfloat16()
    wanted = upstream.flatten(0, 1).float().t() @ x.detach().bfloat16().flatten(0, 1).float()
    narrow = weight.detach().bfloat16().requires_grad_()
    narrow.main_grad = torch.ones_like(weight)
    out = linear_product(x.bfloat16(), narrow, None, allreduce_dgrad=False, sequence_parallel=False, tp_group=None)
    (out * upstream).sum().backward()
    assert out.dtype is torch.bfloat16
    assert narrow.grad is None
    assert narrow.main_grad.dtype is torch.float32
    assert torch.norm(narrow.main_grad - 1 - wanted) / torch.norm(wanted) < 4e-3


def test_large_products_have_equal_bits_wherever_they_lie_in_memory():
    torch.manual_seed(0)
    a = torch.randn(300, 128)
    b = torch.randn(128, 256)
    assert products._onednn_tokens(len(a), b.numel()) == 2 * products.BLOCK
    first = products.token_product(a, b)
    for offset in range(1, 5):
        moved = torch.empty(a.numel() + offset)[offset:].view_as(a).copy_(a)
        assert torch.equal(products.token_product(moved, b), first)
    assert torch.equal(products.token_product(a, b.t().contiguous().t()), first)


def test_a_frozen_weight_and_no_rows():
    x, weight, _ = made(300, 128, 256, bias=False)
    weight.requires_grad_(False)
    out = linear_product(x, weight, None, allreduce_dgrad=False, sequence_parallel=False, tp_group=None)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, weight.sum(0).expand_as(x), rtol=1e-4, atol=1e-4)
    none = linear_product(x[:0], weight, None, allreduce_dgrad=False, sequence_parallel=False, tp_group=None)
    assert none.shape == (0, 1, 256)
