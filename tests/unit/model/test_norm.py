"""RMSNorm against torch's own, on both of its paths, and SwiGLU against torch's operations."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from engine.model import norm as norms
from engine.model.norm import RMSNorm, Sum, add_in_norm, add_to_made
from engine.model.swiglu import SwiGLU
from support.policies import assert_same, step_gradients
from support.tiny_models import save


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


def test_bfloat16_is_rounded_once_and_its_statistics_are_fp32():
    torch.manual_seed(0)
    norm = norm_of(128, torch.bfloat16)
    x = torch.randn(40, 1, 128).bfloat16().requires_grad_()
    upstream = torch.randn(40, 1, 128).bfloat16()
    wide = x.detach().float().requires_grad_(), norm.weight.detach().float().requires_grad_()
    exact = F.rms_norm(wide[0], (128,), wide[1], 1e-5)
    found = torch.autograd.grad(norm(x), (x, norm.weight), upstream)
    for ours, theirs in zip(found, torch.autograd.grad(exact, wide, upstream.float()), strict=True):
        assert ours.dtype is torch.bfloat16
        torch.testing.assert_close(ours.float(), theirs, rtol=2**-8, atol=1e-5)


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("qwen3_moe", False)])
def test_a_layer_whose_norm_makes_the_sum_has_the_same_gradients(
    kind, tied, recompute, settings, tmp_path, monkeypatch
):
    folder = save(tmp_path, kind, vocab_size=256, tie_word_embeddings=tied)
    expected = step_gradients(settings, folder, train__recompute=recompute)
    called = []
    monkeypatch.setattr(norms, "can_fuse", lambda x: True)
    monkeypatch.setattr(norms, "compile_once", lambda function: called.append(function.__name__) or function)
    found = step_gradients(settings, folder, train__recompute=recompute)
    assert set(called) == {"sum_and_norm", "sum_and_norm_gradient"}
    assert_same(found, expected)


def test_a_sum_with_a_bias_or_dropout_is_made_at_once(monkeypatch):
    monkeypatch.setattr(norms, "can_fuse", lambda x: True)
    x = torch.ones(2, 1, 8)
    assert isinstance(add_in_norm(True, False)((x, None), x, 0.0), Sum)
    assert torch.equal(add_in_norm(True, False)((x, x), x, 0.0), 3 * x)
    assert add_in_norm(True, False)((x, None), x, 0.5).max() == 3  # 1 + 1 / (1 − 0.5)
    assert torch.equal(add_to_made(True, False)((x, None), Sum(x, x, made=2 * x), 0.0), 3 * x)


def test_values_and_gradients_are_those_of_the_plain_operations():
    joint = torch.randn(5, 3, 14, dtype=torch.float64, requires_grad=True)
    swiglu = SwiGLU(None)
    gate, up = joint.chunk(2, -1)
    torch.testing.assert_close(swiglu(joint), F.silu(gate) * up, rtol=0, atol=0)
    assert torch.autograd.gradcheck(swiglu, joint)
    weight = torch.randn(5, 3, 7, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), joint)[0] for out in (swiglu(joint), F.silu(gate) * up))
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-15)


def test_swiglu_in_bfloat16_keeps_its_dtype():
    joint = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    out = SwiGLU(None)(joint)
    out.sum().backward()
    assert out.dtype == joint.grad.dtype == torch.bfloat16
