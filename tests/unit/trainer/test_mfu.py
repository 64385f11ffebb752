"""The FLOP utilisation of a step of real Megatron against the closed form of its operations."""

import pytest

from engine.model.flops import micro_step
from support.policies import a_group, a_policy

pytestmark = pytest.mark.usefixtures("megatron")


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
