"""RMSNorm against torch's own, values and gradients, on both of its paths."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from engine.model.norm import RMSNorm


def norm_of(size, dtype):
    norm = RMSNorm(SimpleNamespace(params_dtype=dtype, sequence_parallel=False), size, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize("shape", [(7, 1, 128), (5, 1, 4, 16), (1, 1, 1)])
def test_float32_is_what_torch_computes(shape):
    torch.manual_seed(0)
    norm = norm_of(shape[-1], torch.float32)
    x = torch.randn(shape, requires_grad=True)
    weight = torch.randn(shape)
    grads = [
        torch.autograd.grad((out * weight).sum(), (x, norm.weight))
        for out in (norm(x), F.rms_norm(x.double(), shape[-1:], norm.weight.double(), 1e-5))
    ]
    torch.testing.assert_close(norm(x), F.rms_norm(x, shape[-1:], norm.weight, 1e-5), rtol=2e-6, atol=1e-6)
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_row_of_zeros_has_a_finite_gradient():
    x = torch.zeros(2, 1, 8, requires_grad=True)
    out = norm_of(8, torch.float32)(x)
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.isfinite(x.grad).all()


def test_bfloat16_keeps_its_dtype():
    x = torch.randn(3, 1, 8, dtype=torch.bfloat16)
    norm = norm_of(8, torch.bfloat16)
    assert torch.equal(norm(x), F.rms_norm(x, (8,), norm.weight, 1e-5))
