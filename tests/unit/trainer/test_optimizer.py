"""The optimizer's gradient norm, with the bits of Megatron's functions, and a step's FLOP utilisation, by formula."""

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.flops import micro_step
from support.policies import a_group, a_policy

pytestmark = pytest.mark.usefixtures("megatron")


class Reads(TorchDispatchMode):
    """Counts the numbers that leave their tensor; on a device the host waits for each."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


def test_the_norm_is_read_once_and_is_megatrons_to_the_bit(settings):
    policy = a_policy(settings)
    policy.start_step()
    policy.accumulate([a_group()])
    policy.reduce_gradients(4)
    policy.optimizer.prepare_grads()
    (inner,) = policy.optimizer.chained_optimizers
    gradients = inner.get_main_grads_for_grad_norm()
    theirs, _ = local_multi_tensor_l2_norm(0, None, [gradients], False)
    with Reads() as reads:
        norm = policy.optimizer.get_grad_norm()
    assert norm == float(theirs**2) ** 0.5
    assert reads.count == 1
    parameters = list(policy.models.policy.parameters())
    whole = [parameter.grad.clone() for parameter in parameters]
    clip_grads.clip_grad_by_total_norm_fp32(parameters, max_norm=norm / 3, total_norm=norm)
    factor = (norm / 3) / (norm + 1e-6)
    assert all(torch.equal(parameter.grad, one * factor) for parameter, one in zip(parameters, whole, strict=True))


def test_the_lowest_rate_is_that_of_the_config(settings):
    keys = {"train__schedule": "linear", "train__min_learning_rate": 1e-4}
    policy = a_policy(settings, **keys)
    policy.scheduler.step(increment=10**6)
    assert {group["lr"] for group in policy.optimizer.param_groups} == {1e-4}


@pytest.mark.parametrize(("shared", "peak"), [(True, 0.5e12), (False, 0.5e12), (True, None)])
def test_mfu_is_the_operations_of_the_step_over_its_training_time_and_the_peak(settings, monkeypatch, shared, peak):
    """A device whose peak is not known has none."""
    monkeypatch.setattr("engine.trainer.policy.peak_of", lambda name: peak)
    policy = a_policy(settings, attention__shared_prompt=shared)
    shape = policy.models.shape
    policy.start_step()
    policy.accumulate([a_group(lengths=(6, 6, 6, 6), prompt=9), a_group(lengths=(4, 4, 4, 4), prompt=9, index=1)])
    sizes = [micro_step(sizes=shape, prompt=9, response=size, group=4, shared=shared) for size in (6, 4)]
    policy.update(4)
    figures = policy.figures()
    assert figures.get("mfu") == (pytest.approx(sum(sizes) / (figures["train_s"] * peak)) if peak else None)
