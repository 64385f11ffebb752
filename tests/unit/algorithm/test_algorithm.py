"""A loss by hand, and the figures of how trainer and instance differ. More: test_losses.py, test_advantages.py."""

import math

import pytest
import torch

from engine.algorithm.kl import mismatch_figures
from engine.algorithm.losses import LOSSES
from engine.config import Algorithm
from support.loss_rows import loss_row

grpo = LOSSES["grpo"]


def terms(ratio, advantage, weights):
    """Tokens whose ratio is as given."""
    return loss_row(
        torch.tensor(ratio, dtype=torch.float64).log(), advantage, weights=torch.tensor(weights, dtype=torch.float64)
    )


def test_loss_by_hand():
    # two responses of lengths 2 and 1, A = 1 and -2: the 1.5 is clipped to 1.2, the 0.5 under A < 0 to 0.8
    case = terms([1.5, 1.1, 0.5], [1.0, 1.0, -2.0], [0.5, 0.5, 1.0])
    loss = grpo(case, Algorithm())
    assert float(loss.total.detach()) == pytest.approx(-((1.2 + 1.1) / 2 + min(0.5 * -2, 0.8 * -2)))
    loss.total.backward()
    # d/dlogp of -w·r·A where unclipped, 0 where clipped
    assert case.logprobs.grad.tolist() == pytest.approx([0.0, -0.5 * 1.1, 0.0])
    assert float(loss.clipped) == pytest.approx(0.5 + 1.0)


def test_masked_tokens_carry_no_gradient():
    case = terms([1.0, 1.0], [1.0, 1.0], [1.0, 0.0])
    grpo(case, Algorithm()).total.backward()
    assert case.logprobs.grad.tolist() == [-1.0, 0.0]


def test_mismatch():
    trainer = torch.tensor([-1.0, -2.0])
    rollout = torch.tensor([-1.0, -2.1])
    gap, divergence = mismatch_figures(trainer, rollout)
    assert gap == pytest.approx(math.exp(0.1) - 1, rel=1e-5)
    assert divergence == pytest.approx(math.exp(0.1) - 0.1 - 1, rel=1e-4)
    assert mismatch_figures(torch.empty(0), torch.empty(0)) == (0.0, 0.0)
    assert math.isnan(mismatch_figures(torch.tensor([float("nan")]), torch.tensor([0.0]))[0])


def test_mismatch_of_tokens_that_differ_by_rounding():
    """In fp32 the estimates, half the squares of the gaps, would have no right digit."""
    rollout = torch.full((1000,), -1.0)
    gap, divergence = mismatch_figures(rollout + 2**-23, rollout)
    assert gap == pytest.approx(2**-23, rel=1e-6)
    assert divergence == pytest.approx(1000 * 2**-47, rel=1e-3)


class WithoutFp64(torch.Tensor):
    """As of a device that has no fp64."""

    def double(self):
        raise TypeError("float64 is not supported on this device")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_mismatch_of_a_device_without_fp64():
    trainer = torch.randn(7)
    rollout = torch.randn(7)
    assert mismatch_figures(trainer.as_subclass(WithoutFp64), rollout.as_subclass(WithoutFp64)) == mismatch_figures(
        trainer, rollout
    )
