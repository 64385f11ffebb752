"""Weight gradients added within their product: Megatron's layers with torch's call, plain operations in its place."""

import pytest
import torch
from megatron.core.tensor_parallel import layers

from engine.model import linear
from engine.trainer.ranks import models
from support.policies import assert_same, step_gradients
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
