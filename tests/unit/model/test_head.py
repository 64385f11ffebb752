"""Logits of a bf16 model in fp32: their values and gradients, alone and as the output layer of a model."""

import pytest
import torch

from engine.model.linear import head_product
from support.policies import a_group, a_policy
from support.tiny_models import save

pytestmark = pytest.mark.usefixtures("megatron")


def test_values_are_not_rounded_and_gradients_are_those_of_a_bf16_layer():
    torch.manual_seed(0)
    x, weight = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((37, 1, 64), (100, 64)))
    out = head_product(x, weight, None, allreduce_dgrad=False, sequence_parallel=False, tp_group=None)
    exact = x.detach().double() @ weight.detach().double().t()
    assert out.dtype is torch.float32
    assert (out - exact).abs().max() < 1e-5
    assert (out.bfloat16() - exact).abs().max() > 1e-2  # what a bf16 layer loses
    upstream = torch.randn(out.shape).bfloat16()
    found = torch.autograd.grad(out, (x, weight), upstream.float())
    expected = torch.autograd.grad(x @ weight.t(), (x, weight), upstream)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is torch.bfloat16
        assert (ours - theirs).norm() <= 1e-3 * theirs.norm()


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
        seen = []
        model = policy.models.policy
        output = next(one for name, one in model.named_modules() if name.endswith("output_layer"))
        hook = output.register_forward_hook(
            lambda _, given, named, out, seen=seen: seen.append((given[0], named["weight"], out[0])), with_kwargs=True
        )
        policy.models.probe(range(16))
        hook.remove()
        ((hidden, weight, out),) = seen
        exact = hidden.double() @ (output.weight if weight is None else weight).double().t()
        assert ((out - exact).abs().max() < 1e-5) == (head_dtype == "float32")
        policy.start_step()
        policy.accumulate([a_group((4, 0, 16, 1), seed=1)])
        gradients[head_dtype] = {name: one.main_grad.clone() for name, one in model.named_parameters()}
    for name, gradient in gradients["model"].items():
        assert (gradients["float32"][name] - gradient).norm() <= 0.05 * gradient.norm(), name
