"""Weight gradients added within their product: Megatron's layers with torch's call, plain operations in its place."""

import pytest
import torch
from megatron.core.tensor_parallel import layers

from engine.model import linear
from engine.trainer.ranks import models
from support.policies import a_group, a_policy
from support.tiny_models import save

pytestmark = pytest.mark.usefixtures("megatron")


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


def gradients(settings, folder):
    policy = a_policy(settings, model__path=folder, train__dtype="bfloat16", train__ratio_gap_limit=0)
    policy.start_step()
    for seed in (1, 2):
        policy.accumulate([a_group((4, 0, 16, 1), seed=seed)])
    return {name: one.main_grad.clone() for name, one in policy.models.policy.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
def test_the_sums_are_those_of_single_products(settings, tmp_path, products, tied, monkeypatch):
    folder = save(tmp_path, "qwen3", vocab_size=256, tie_word_embeddings=tied)
    expected = gradients(settings, folder)
    assert not products
    monkeypatch.setattr(models, "can_fuse_gradients", lambda device, dtype: True)
    found = gradients(settings, folder)
    assert len(products) >= 2 * sum("linear" in name for name in expected)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 0.01 * gradient.norm(), name


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
