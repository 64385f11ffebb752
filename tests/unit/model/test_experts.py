"""The product of all experts at once: equal to one expert after the other, values and gradients."""

from types import SimpleNamespace

import pytest
import torch

from engine.model import experts
from engine.trainer.micro_batches import micro_batches
from support.policies import a_group, a_policy
from support.tiny_models import save

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def grouped(monkeypatch):
    """torch's grouped product in the place of a device's. Keeps where the weights of its calls lie."""
    called = []

    def product(x, weights, ends):
        called.append(weights.data_ptr())
        return experts._by_torch(x, weights, ends)

    monkeypatch.setattr(experts, "product_for", lambda x, *sizes: product)
    return called


def gradients(settings, folder, **changes):
    """Log-probabilities of a group under a mixture, and the gradients of all of its parameters."""
    policy = a_policy(settings, model__path=folder, train__ratio_gap_limit=0, **changes)
    policy.start_step()
    group = a_group((4, 0, 16, 1), seed=2)
    policy.accumulate([group])
    scores = policy._policy_scores(
        policy._frozen_scores(micro_batches([group], policy.packing, policy.group_advantages))
    )[0]
    return scores, {name: one.main_grad.clone() for name, one in policy.models.policy.named_parameters()}


def test_the_product_takes_the_weights_where_they_lie(settings, tmp_path, grouped):
    """A layer has two parameters for all of its experts: none is copied, and each has one gradient to add."""
    folder = save(tmp_path, "qwen3_moe", vocab_size=256)
    alone = {"algorithm__old_policy": "behavior", "algorithm__kl_coef": 0, "train__ratio_gap_limit": 0}
    policy = a_policy(settings, model__path=folder, **alone)
    weights = [one for name, one in policy.models.policy.named_parameters() if ".experts." in name]
    assert [tuple(one.shape) for one in weights] == [(4, 64, 48), (4, 48, 32)] * 2
    policy.start_step()
    policy.accumulate([a_group()])
    assert set(grouped) == {one.data_ptr() for one in weights}


@pytest.mark.parametrize("recompute", [False, True])
def test_a_mixture_has_the_gradients_of_its_experts_one_by_one(settings, tmp_path, request, recompute):
    folder = save(tmp_path, "qwen3_moe", vocab_size=256)
    expected, expected_gradients = gradients(settings, folder, train__recompute=recompute)
    called = request.getfixturevalue("grouped")
    found, found_gradients = gradients(settings, folder, train__recompute=recompute)
    assert called
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in found_gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-6, msg=name)
    assert any(gradient.abs().max() > 1e-3 for name, gradient in found_gradients.items() if "experts" in name)


def test_a_cpu_computes_one_expert_after_the_other(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(experts, "_by_torch", None)
    _, found = gradients(settings, save(tmp_path, "qwen3_moe", vocab_size=256))
    assert any(gradient.abs().max() > 1e-3 for name, gradient in found.items() if "experts" in name)


@pytest.mark.parametrize("sizes", [[3, 0, 5], [0, 0, 8], [8, 0, 0]])
def test_bfloat16_stays_near_fp32(sizes):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, 16, generator=draw).requires_grad_()
    weights = torch.randn(len(sizes), 24, 16, generator=draw).requires_grad_()
    above = torch.randn(8, 24, generator=draw)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        out = experts.grouped_product(experts._by_torch, sizes, x.to(dtype), weights.to(dtype))
        found.append([out, *torch.autograd.grad(out, (x, weights), above.to(dtype))])
    for exact, near in zip(*found, strict=True):
        torch.testing.assert_close(near.float(), exact, rtol=0.02, atol=0.15)


@pytest.mark.parametrize(("tensor", "expert", "reduced"), [(1, 1, True), (2, 1, False), (1, 2, False), (2, 2, False)])
def test_experts_are_reduced_like_attention_only_where_neither_is_split(tensor, expert, reduced):
    config = SimpleNamespace(
        expert_model_parallel_size=expert, tensor_model_parallel_size=tensor, params_dtype=torch.float32
    )
    assert experts._weights(config, 2, 4, 3).allreduce == reduced


def test_only_kernels_of_a_platform_are_used():
    on_host = torch.zeros(2, 8, dtype=torch.bfloat16)
    assert experts.product_for(on_host, 8, 8) is None

    class OnCuda:
        """What a tensor says on a GPU."""

        device = torch.device("cuda", 0)
        is_cuda = True

        def __init__(self, dtype):
            self.dtype = dtype

    assert experts.product_for(OnCuda(torch.bfloat16), 8, 16) is experts._by_torch
    assert experts.product_for(OnCuda(torch.float32), 8, 16) is None
    assert experts.product_for(OnCuda(torch.bfloat16), 8, 12) is None
