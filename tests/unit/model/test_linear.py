"""Linear layers: products by both libraries against double precision, logits in fp32, and weight gradients that
are added within their product."""

import pytest
import torch
from megatron.core.tensor_parallel import layers

from engine.model import linear
from engine.model.build import compute_hidden, output_weight, target_logprobs
from engine.model.layout import make_layout
from engine.model.linear import linear_product
from engine.trainer.ranks import models
from support.policies import a_group, a_policy, assert_same, step_gradients
from support.tiny_models import save

pytestmark = pytest.mark.usefixtures("megatron")

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
    monkeypatch.setattr(linear, "LARGE", large)
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
    monkeypatch.setattr(linear, "LARGE", large)
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
    monkeypatch.setattr(linear, "PIECE", 5000)  # more than one piece, the last one shorter
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
    assert linear._onednn_tokens(len(a), b.numel()) == 2 * linear.BLOCK
    first = linear.token_product(a, b)
    for offset in range(1, 5):
        moved = torch.empty(a.numel() + offset)[offset:].view_as(a).copy_(a)
        assert torch.equal(linear.token_product(moved, b), first)
    assert torch.equal(linear.token_product(a, b.t().contiguous().t()), first)


def test_a_frozen_weight_and_no_rows():
    x, weight, _ = made(300, 128, 256, bias=False)
    weight.requires_grad_(False)
    out = linear_product(x, weight, None, allreduce_dgrad=False, sequence_parallel=False, tp_group=None)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, weight.sum(0).expand_as(x), rtol=1e-4, atol=1e-4)
    none = linear_product(x[:0], weight, None, allreduce_dgrad=False, sequence_parallel=False, tp_group=None)
    assert none.shape == (0, 1, 256)


def policy_of(settings, folder, head_dtype):
    return a_policy(
        settings, model__path=folder, model__head_dtype=head_dtype, train__dtype="bfloat16", train__ratio_gap_limit=0
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_has_it_as_its_output_layer(settings, tmp_path, tied):
    folder = save(tmp_path, "qwen3", vocab_size=256, tie_word_embeddings=tied)
    gradients = {}
    for head_dtype in ("model", "float32"):
        policy = policy_of(settings, folder, head_dtype)
        row = make_layout([(range(4), [range(4, 16)])])
        model = policy.models.policy
        with torch.no_grad():
            hidden = compute_hidden(model, row)
            found = target_logprobs(model, hidden, row, 1.0)[0]
        logs = (hidden.double() @ output_weight(model).double().t())[:, :256].log_softmax(-1)
        exact = logs.gather(1, row.targets[:, None])[:, 0]
        assert ((found - exact).abs().max() < 1e-5) == (head_dtype == "float32")
        policy.start_step()
        policy.accumulate([a_group((4, 0, 16, 1), seed=1)])
        gradients[head_dtype] = {name: one.main_grad.clone() for name, one in model.named_parameters()}
    for name, gradient in gradients["model"].items():
        assert (gradients["float32"][name] - gradient).norm() <= 0.05 * gradient.norm(), name


@pytest.fixture
def products(monkeypatch):
    """torch's `addmm` with an fp32 result, which it has for CUDA only. The shapes of its calls."""
    plain = torch.addmm
    called = []

    def addmm(total, a, b, *, out_dtype=None, out=None, **others):
        if out_dtype is None:
            return plain(total, a, b, out=out, **others)
        assert (a.dtype, b.dtype, total.dtype, out_dtype) == (torch.bfloat16,) * 2 + (torch.float32,) * 2
        assert out is total
        called.append(tuple(total.shape))
        return total.addmm_(a.float(), b.float())

    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(linear, "install_linear", lambda model: None)  # on CUDA the products are Megatron's
    for name in ("fused_weight_gradient_mlp_cuda", "_grad_accum_fusion_available"):
        monkeypatch.setattr(layers, name, vars(layers).get(name), raising=False)
    return called


@pytest.mark.parametrize("tied", [False, True])
def test_the_sums_are_those_of_single_products(settings, tmp_path, products, tied, monkeypatch):
    folder = save(tmp_path, "qwen3", vocab_size=256, tie_word_embeddings=tied)
    coarse = {"train__dtype": "bfloat16", "train__ratio_gap_limit": 0}
    expected = step_gradients(settings, folder, **coarse)
    assert not products
    monkeypatch.setattr(models, "can_fuse_gradients", lambda device, dtype: True)
    found = step_gradients(settings, folder, **coarse)
    assert len(products) >= 2 * sum("linear" in name for name in expected)
    assert_same(found, expected, 0.01)


def test_only_cuda_in_bfloat16_has_it():
    assert linear.can_fuse_gradients(torch.device("cuda", 0), torch.bfloat16)
    assert not linear.can_fuse_gradients(torch.device("cuda", 0), torch.float32)
    assert not linear.can_fuse_gradients(torch.device("cpu"), torch.bfloat16)


def test_the_call_is_one_that_torch_knows():
    schema = str(torch.ops.aten.addmm.dtype_out._schema)
    assert schema.startswith("aten::addmm.dtype_out(Tensor self, Tensor mat1, Tensor mat2, ScalarType out_dtype, *,")
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="aten::addmm.dtype_out"):  # a CPU has no kernel for it
        linear.Accumulation.wgrad_gemm_accum_fp32(x, x, torch.zeros(3, 3))
