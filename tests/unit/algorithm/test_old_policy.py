"""What `algorithm.old_policy` makes of a batch: the expected gradient of the loss on a bandit with three arms, exactly.

A response is one token, one of three arms. A row of `Terms` has every arm once, and its weight is the probability with
which the sampling policy draws it, so sums over tokens are expectations. Gradients are those of the logits.
"""

import pytest
import torch

from engine.algorithm.losses import LOSSES, Terms
from engine.config import Algorithm

REWARDS = torch.tensor([1.0, 0.0, 0.4], dtype=torch.float64)
BEFORE = torch.tensor([0.0, 0.6, 0.1], dtype=torch.float64).log_softmax(-1)
"""The policy before the last update: the sampling policy of one_step_off, and `old_policy = "previous"`."""
LOGITS = torch.tensor([0.5, 0.2, 0.1], dtype=torch.float64)
CLIPPED = Algorithm()
WIDE = Algorithm(clip_low=0.99, clip_high=99.0)
"""Bounds that never act."""


def advantages():
    return REWARDS - (LOGITS.softmax(-1) * REWARDS).sum()


def true_gradient():
    """∇ Σ π R."""
    logits = LOGITS.clone().requires_grad_()
    (logits.softmax(-1) * REWARDS).sum().backward()
    return logits.grad


DECOUPLED = Algorithm(mismatch="truncate", mismatch_limit=99.0)


def gradient(sampled, old, coefficients=CLIPPED, loss="grpo"):
    """The expected gradient on arms drawn from `sampled`; `old`: log-probabilities in the ratio's denominator."""
    logits = LOGITS.clone().requires_grad_()
    terms = Terms(
        logprobs=logits.log_softmax(-1),
        old=old.detach(),
        reference=None,
        entropy=torch.zeros(3, dtype=torch.float64),
        advantages=advantages(),
        weights=sampled.exp().detach(),
        rollout=sampled.detach(),
        response=torch.arange(3),
        responses=3,
    )
    (-LOSSES[loss](terms, coefficients).total).backward()
    return logits.grad


NOW = LOGITS.log_softmax(-1)


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "gspo", "cispo", "gpg"])
def test_behavior_on_data_of_the_current_weights_is_the_policy_gradient(loss):
    """sync and periodic, with or without bounds that could act. The instance's own probabilities ("rollout") are the
    same numbers there."""
    torch.testing.assert_close(gradient(NOW, NOW, CLIPPED, loss), true_gradient())


def test_previous_on_data_of_the_current_weights_is_another_gradient():
    """The papers' Algorithm 1, in sync and periodic: r = π/π_previous weighs samples of π as if π_previous had drawn
    them. Without the clip the expectation is Σ π²/π_previous A ∇ log π; the clip takes more."""
    weighed = gradient(NOW, BEFORE, WIDE)
    logits = LOGITS.clone().requires_grad_()
    surrogate = (NOW.exp() * (logits.log_softmax(-1) - BEFORE).exp() * advantages()).sum()
    surrogate.backward()
    torch.testing.assert_close(weighed, logits.grad)
    true = true_gradient()
    assert (weighed - true).norm() > 0.2 * true.norm()
    clipped = gradient(NOW, BEFORE)
    assert (clipped - true).norm() > 0.5 * true.norm()


def test_on_data_of_the_weights_before_previous_is_an_importance_ratio():
    """one_step_off, and "rollout" anywhere: without the clip it is the gradient of the current policy; with it, of the
    arms inside the bounds. "behavior" is Σ π_previous A ∇ log π, which nothing corrects."""
    true = true_gradient()
    torch.testing.assert_close(gradient(BEFORE, BEFORE, WIDE), true)
    assert (gradient(BEFORE, NOW) - true).norm() > 0.05 * true.norm()
    logits = LOGITS.clone().requires_grad_()
    (BEFORE.exp() * advantages() * logits.log_softmax(-1)).sum().backward()
    torch.testing.assert_close(gradient(BEFORE, NOW), logits.grad)


def test_behavior_with_the_mismatch_weight_is_the_decoupled_loss():
    """verl's: the clip is against the recomputed old policy, at ratio 1, and w = π_old/π_rollout corrects for the age
    of the samples. Truncated, it is bounded, and the clip bounds nothing of it."""
    torch.testing.assert_close(gradient(BEFORE, NOW, DECOUPLED), true_gradient())
    bounded = Algorithm(mismatch="truncate", mismatch_limit=1.2)
    logits = LOGITS.clone().requires_grad_()
    weight = (NOW - BEFORE).exp().clamp(max=1.2)
    (BEFORE.exp() * weight * advantages() * logits.log_softmax(-1)).sum().backward()
    torch.testing.assert_close(gradient(BEFORE, NOW, bounded), logits.grad)
