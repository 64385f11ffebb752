"""M2PO and BAPO: hand-computed values, NumPy written as the algorithms are told, finite differences,
and what must not matter."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from engine.algorithm.batch_statistics import (
    BatchTokens,
    balanced_bounds,
    positive_share,
    second_moment_limit,
)
from engine.algorithm.losses import LOSSES
from engine.config import Algorithm
from support.loss_rows import loss_row

NAMES = ("m2po", "bapo")
LIMITS = Algorithm()
values = st.lists(st.tuples(st.floats(-2, 2), st.floats(-1.5, 1.5)), min_size=1, max_size=12)
"""(advantage, log-ratio) of each token."""


def tokens_of(found):
    advantages, logs = (torch.tensor(column, dtype=torch.float64) for column in zip(*found, strict=True))
    return BatchTokens(logs, advantages)


def terms_of(name, found, whole=None):
    """Terms of the tokens `found`, with statistics over the batch `whole`."""
    statistics = LOSSES[name].statistics(tokens_of(whole or found), LIMITS)
    return loss_row(*zip(*[(log, advantage) for advantage, log in found], strict=True), statistics=statistics)


def total(name, terms):
    return LOSSES[name](terms, Algorithm()).total


# references: loops over tokens, as the papers' algorithms are told --------------------------------


def m2po_reference(found):
    """Algorithm 1: while the mean of (log r)² over outward tokens is above τ, mask the largest.
    Sum of r A over the others."""
    outward = [i for i, (a, log) in enumerate(found) if (a > 0 and log > 0) or (a < 0 and log < 0)]
    while outward and np.mean([found[i][1] ** 2 for i in outward]) > 0.04:
        outward.remove(max(outward, key=lambda i: found[i][1] ** 2))
    inward = [i for i, (a, log) in enumerate(found) if not ((a > 0 and log > 0) or (a < 0 and log < 0))]
    return sum(np.exp(found[i][1]) * found[i][0] for i in outward + inward)


def bapo_reference(found):
    """Algorithm 1 with eq. 8's share of the surrogate, bounds in steps of 0.05: the upper first, then the lower."""

    def parts(low, high):
        surrogate = [min(np.exp(log) * a, np.clip(np.exp(log), low, high) * a) for a, log in found]
        return sum(value for value in surrogate if value > 0), -sum(value for value in surrogate if value < 0)

    for low, high in [(0.6, 1.2 + 0.05 * k) for k in range(37)] + [(0.6 + 0.05 * k, 3.0) for k in range(1, 7)]:
        positive, negative = parts(low, high)
        if positive + negative == 0 or positive / (positive + negative) >= 0.5 - 1e-6:
            break
    return positive - negative


def apart(found):
    """Whether no two tokens tie and nothing lies on an edge, so that the plain loops decide as the sorted sums do."""
    squares = sorted(log**2 for _, log in found)
    return all(b - a > 1e-6 for a, b in zip(squares, squares[1:], strict=False))


@given(found=values)
@example(found=[(-1.0, -0.25), (-1.26e-35, -1.11e-308)])  # their product is no float above 0
def test_m2po_is_algorithm_1(found):
    if apart(found):
        assert -float(total("m2po", terms_of("m2po", found)).detach()) == pytest.approx(
            m2po_reference(found), rel=1e-9, abs=1e-9
        )


@given(found=values)
def test_bapo_is_algorithm_1(found):
    assert -float(total("bapo", terms_of("bapo", found)).detach()) == pytest.approx(
        bapo_reference(found), rel=1e-6, abs=1e-9
    )


# by hand ------------------------------------------------------------------------------------------


def test_m2po_by_hand():
    """(log r)² of the outward tokens: 0.01, 0.04, 0.09: mean 0.0467 > 0.04, without the largest 0.025.
    Inward ones: not."""
    found = [(1.0, 0.1), (1.0, 0.2), (2.0, 0.3), (1.0, -1.0), (-1.0, 1.0)]
    (limit,) = second_moment_limit(tokens_of(found), LIMITS)
    assert limit == pytest.approx((0.04 + 0.09) / 2)
    terms = terms_of("m2po", found)
    gains, masked = LOSSES["m2po"].gain(terms, Algorithm())
    assert masked.tolist() == [False, False, True, False, False]
    assert gains.tolist() == pytest.approx([math.exp(0.1), math.exp(0.2), 0.0, math.exp(-1.0), -math.exp(1.0)])


def test_m2po_keeps_all_or_none_of_equal_tokens():
    kept = second_moment_limit(tokens_of([(1.0, 0.2)] * 4), LIMITS)  # 0.04, but for rounding
    assert kept == (math.inf,) or kept[0] < 0.04
    assert second_moment_limit(tokens_of([(1.0, 0.1), (1.0, 0.5), (1.0, 0.5)]), LIMITS)[0] == pytest.approx(
        (0.01 + 0.25) / 2
    )
    # the first of two equal ones would fit: means 0.01, 0.03625 and 0.045
    assert second_moment_limit(tokens_of([(1.0, 0.1), (1.0, 0.25), (1.0, 0.25)]), LIMITS)[0] < 0.25**2
    assert second_moment_limit(tokens_of([(-1.0, -0.5)]), LIMITS)[0] == pytest.approx(0.125)
    assert second_moment_limit(tokens_of([(1.0, -5.0)]), LIMITS) == (math.inf,)


def test_bapo_by_hand():
    """P = min(r, c_high) A with r = 2, N = 1.5: a share of a half at c_high = 1.5, six steps of 0.05 above 1.2."""
    found = [(1.0, math.log(2.0)), (-1.5, 0.0)]
    assert positive_share(tokens_of(found), 0.6, 1.2) == pytest.approx(1.2 / 2.7)
    low, high = balanced_bounds(tokens_of(found), LIMITS)
    assert (low, high) == (0.6, pytest.approx(1.5))
    gains, clipped = LOSSES["bapo"].gain(terms_of("bapo", found), Algorithm())
    assert gains.tolist() == pytest.approx([1.5, -1.5])
    assert clipped.tolist() == [True, False]


def test_bapo_ends_at_its_widest_where_nothing_is_positive():
    found = [(-1.0, math.log(0.5)), (-1.0, 0.1)]
    assert balanced_bounds(tokens_of(found), LIMITS) == (0.9, 3.0)
    terms = terms_of("bapo", found)
    total("bapo", terms).backward()
    assert terms.logprobs.grad[0] == 0  # below the lower bound: no gradient pushes it further down
    assert terms.logprobs.grad[1] == pytest.approx(math.exp(0.1))


# what must hold for both --------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_their_scope_is_the_batch(name):
    assert LOSSES[name].scope == "batch"
    assert {other for other, loss in LOSSES.items() if loss.scope == "batch"} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@given(found=values)
def test_micro_batches_with_the_batchs_statistics_add_up(name, found):
    """Whatever the split: its parts see statistics over the whole."""
    cut = len(found) // 2
    parts = [part for part in (found[:cut], found[cut:]) if part]
    split = sum(float(total(name, terms_of(name, part, found)).detach()) for part in parts)
    assert split == pytest.approx(float(total(name, terms_of(name, found)).detach()), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
@given(found=values, seed=st.integers(0, 1000))
def test_the_order_of_tokens_decides_nothing(name, found, seed):
    order = np.random.default_rng(seed).permutation(len(found))
    shuffled = [found[at] for at in order]
    one = terms_of(name, found)
    other = terms_of(name, shuffled)
    assert one.statistics == pytest.approx(other.statistics)
    total(name, one).backward()
    total(name, other).backward()
    torch.testing.assert_close(other.logprobs.grad, one.logprobs.grad[torch.tensor(order)])


@pytest.mark.parametrize("name", NAMES)
@given(advantages=st.lists(st.floats(-2, 2), min_size=1, max_size=6))
def test_at_ratio_one_both_are_the_policy_gradient(name, advantages):
    terms = terms_of(name, [(a, 0.0) for a in advantages])
    loss = LOSSES[name](terms, Algorithm())
    loss.total.backward()
    torch.testing.assert_close(terms.logprobs.grad, -terms.advantages)
    assert float(loss.clipped) == 0
    plain = replace(terms, logprobs=terms.logprobs.detach().requires_grad_(), statistics=())
    assert float(loss.total.detach()) == pytest.approx(float(total("dapo", plain).detach()))


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_give_nothing(name):
    terms = terms_of(name, [(0.0, 0.7), (0.0, -0.7)])
    total(name, terms).backward()
    assert terms.logprobs.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
def test_all_tokens_masked_or_clipped_carry_no_gradient(name):
    terms = terms_of(name, [(1.0, 1.4), (1.0, 1.3), (-1.0, -1.4), (-1.0, -1.3)])
    if name == "bapo":  # bounds that no batch of theirs would stop at
        terms = replace(terms, statistics=(0.9, 1.2))
    loss = LOSSES[name](terms, Algorithm())
    loss.total.backward()
    assert terms.logprobs.grad.abs().max() == 0
    assert float(loss.clipped) == 4


@pytest.mark.parametrize("name", NAMES)
@given(found=values)
def test_gradients_are_finite_differences(name, found):
    """With the statistics held, as in a backward pass."""
    terms = terms_of(name, found)
    edges = [math.sqrt(terms.statistics[0])] if name == "m2po" else [abs(math.log(bound)) for bound in terms.statistics]
    if any(abs(abs(log) - edge) < 1e-3 for _, log in found for edge in [*edges, 0.0]):
        return
    total(name, terms).backward()
    for token in range(len(found)):
        step = torch.zeros_like(terms.logprobs)
        step[token] = 1e-6
        up, down = (
            float(total(name, replace(terms, logprobs=(terms.logprobs + sign * step).detach()))) for sign in (1, -1)
        )
        assert float(terms.logprobs.grad[token]) == pytest.approx((up - down) / 2e-6, rel=1e-4, abs=1e-6)


def test_an_empty_batch_has_statistics():
    empty = BatchTokens(torch.zeros(0), torch.zeros(0))
    assert second_moment_limit(empty, LIMITS) == (math.inf,)
    assert balanced_bounds(empty, LIMITS) == (0.6, 1.2)
