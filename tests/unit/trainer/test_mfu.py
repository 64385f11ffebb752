"""The FLOP utilisation of a step of real Megatron against the closed form of its operations."""

import pytest

from engine.model.flops import micro_step
from support.policies import a_group, a_policy

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize("shared", [True, False])
def test_mfu_is_the_operations_of_the_step_over_its_training_time_and_the_peak(settings, monkeypatch, shared):
    monkeypatch.setattr("engine.trainer.policy.peak_of", lambda name: 0.5e12)
    policy = a_policy(settings, attention__shared_prompt=shared)
    shape = policy.models.shape
    policy.start_step()
    policy.accumulate([a_group(lengths=(6, 6, 6, 6), prompt=9), a_group(lengths=(4, 4, 4, 4), prompt=9, index=1)])
    sizes = [micro_step(sizes=shape, prompt=9, response=size, group=4, shared=shared) for size in (6, 4)]
    policy.update(4)
    figures = policy.figures()
    assert figures["mfu"] == pytest.approx(sum(sizes) / (figures["train_s"] * 0.5e12))


def test_a_device_whose_peak_is_not_known_has_no_mfu(settings):
    policy = a_policy(settings)
    policy.start_step()
    policy.accumulate([a_group()])
    policy.update(4)
    assert "mfu" not in policy.figures()
