import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.algorithm.advantages import ADVANTAGES
from engine.algorithm.kl import k3, mismatch_figures
from engine.algorithm.losses import LOSSES, Coefficients, Terms

grpo = LOSSES["grpo"]
rewards = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)


def advantages(values):
    return ADVANTAGES["grpo"](values, torch.ones_like(values))


def test_advantage_of_one_right_in_four():
    # mean 1/4, sample std 1/2: (1 - 1/4) / (1/2) = 1.5
    got = advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert got.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


@given(st.floats(-1e6, 1e6, width=32), st.integers(2, 16))
def test_equal_rewards_give_exactly_zero(value, size):
    assert advantages(torch.full((size,), value)).tolist() == [0.0] * size


@given(rewards, st.floats(-5, 5), st.floats(0.5, 4), st.randoms())
def test_advantages_ignore_shift_and_scale_and_follow_permutations(values, shift, scale, random):
    plain = torch.tensor(values, dtype=torch.float64)
    if plain.std() < 1e-2:
        return
    torch.testing.assert_close(advantages(plain * scale + shift), advantages(plain), rtol=1e-3, atol=1e-3)
    order = list(range(len(values)))
    random.shuffle(order)
    torch.testing.assert_close(advantages(plain[order]), advantages(plain)[order])


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        advantages(torch.tensor([1.0]))


def test_k3_closed_form_and_gradient():
    policy = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -2.0], dtype=torch.float64)
    value = k3(policy, reference)
    assert value.tolist() == pytest.approx([math.exp(-0.5) + 0.5 - 1, 0.0])
    value.sum().backward()
    assert policy.grad.tolist() == pytest.approx([1 - math.exp(-0.5), 0.0])


def terms(ratio, advantage, weights, reference=None):
    """Tokens whose old log-probability is -1 and whose ratio is as given."""
    ratio = torch.tensor(ratio, dtype=torch.float64)
    old = torch.full_like(ratio, -1.0)
    logprobs = (old + ratio.log()).requires_grad_()
    tensor = torch.tensor(advantage, dtype=torch.float64)
    weights = torch.tensor(weights, dtype=torch.float64)
    number = torch.zeros(len(ratio), dtype=torch.long)
    return Terms(
        logprobs=logprobs,
        old=old,
        reference=reference,
        entropy=torch.zeros_like(ratio),
        advantages=tensor,
        weights=weights,
        rollout=old,
        response=number,
        responses=1,
    )


def test_loss_by_hand():
    # two responses of lengths 2 and 1, A = 1 and -2: the 1.5 is clipped to 1.2, the 0.5 under A < 0 to 0.8
    case = terms([1.5, 1.1, 0.5], [1.0, 1.0, -2.0], [0.5, 0.5, 1.0])
    loss = grpo(case, Coefficients(0.2, 0.2, 0.0, 0.0))
    assert float(loss.total.detach()) == pytest.approx(-((1.2 + 1.1) / 2 + min(0.5 * -2, 0.8 * -2)))
    loss.total.backward()
    # d/dlogp of -w·r·A where unclipped, 0 where clipped
    assert case.logprobs.grad.tolist() == pytest.approx([0.0, -0.5 * 1.1, 0.0])
    assert float(loss.clipped) == pytest.approx(0.5 + 1.0)


def test_ratio_one_gives_the_policy_gradient_and_the_kl_term():
    reference = torch.tensor([-1.3, -0.7], dtype=torch.float64)
    case = terms([1.0, 1.0], [2.0, -1.0], [0.5, 0.5], reference)
    loss = grpo(case, Coefficients(0.2, 0.2, 0.1, 0.0))
    loss.total.backward()
    x = reference + 1.0
    expected = -0.5 * torch.tensor([2.0, -1.0], dtype=torch.float64) + 0.1 * 0.5 * (1 - x.exp())
    torch.testing.assert_close(case.logprobs.grad, expected)


@given(st.lists(st.floats(0.3, 3.0), min_size=1, max_size=8), st.floats(-2, 2))
def test_gradient_is_the_finite_difference(ratios, advantage):
    if any(abs(r - edge) < 1e-3 for r in ratios for edge in (0.8, 1.2)):
        return  # the clip has a kink there
    case = terms(ratios, [advantage] * len(ratios), [1 / len(ratios)] * len(ratios))
    coefficients = Coefficients(0.2, 0.2, 0.0, 0.0)
    grpo(case, coefficients).total.backward()
    step = 1e-6
    moved = replace(case, logprobs=(case.logprobs + step).detach())
    rise = (grpo(moved, coefficients).total - grpo(case, coefficients).total.detach()) / step
    assert float(rise) == pytest.approx(float(case.logprobs.grad.sum()), abs=1e-4)


def test_masked_tokens_carry_no_gradient():
    case = terms([1.0, 1.0], [1.0, 1.0], [1.0, 0.0])
    grpo(case, Coefficients(0.2, 0.2, 0.0, 0.0)).total.backward()
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
