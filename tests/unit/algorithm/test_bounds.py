"""The bounds of the losses: at the sizes at which a ratio would do harm, and bit by bit where they must not act."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.algorithm.batch_statistics import BatchTokens, balanced_bounds, positive_share
from engine.algorithm.kl import k3, mismatch_figures
from engine.algorithm.losses import LOSSES, correction_weights
from engine.config import Algorithm
from support.loss_rows import loss_row

COEFFICIENTS = Algorithm(clip_high=0.28)
DUAL = COEFFICIENTS.model_copy(update={"dual_clip": 3.0})
DUAL_CLIPPED = ("grpo", "dapo", "dr_grpo")
WIDEST = (0.9, 3.0)
"""Statistics of bapo, the bounds where it ends."""


def terms_of(logs, advantages, name="grpo", dtype=torch.float32):
    """One response whose tokens have these log-ratios."""
    each = 1 / len(logs) if LOSSES[name].aggregation == "response" else 1.0
    statistics = {"m2po": (math.inf,), "bapo": WIDEST}.get(name, ())
    return loss_row(logs, advantages, dtype, weights=torch.full((len(logs),), each, dtype=dtype), statistics=statistics)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("log", [95.0, -95.0, 800.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_no_ratio_overflows(name, log, advantage):
    """e^89 is no fp32 number: clipped, its gradient was 0 · inf."""
    terms = terms_of([log, 0.0], [advantage, advantage], name)
    loss = LOSSES[name](terms, COEFFICIENTS)
    loss.total.backward()
    assert torch.isfinite(loss.total)
    assert torch.isfinite(terms.logprobs.grad).all()
    assert float(loss.ratio_max) <= math.exp(20) * (1 + 1e-6)


@pytest.mark.parametrize("name", DUAL_CLIPPED)
def test_a_dual_clip_bounds_the_ratio_of_a_token_that_got_worse_and_likelier(name):
    """A = −1 with r = 35, a size of the staleness table: PPO's clip leaves it 35 times its weight; a dual clip of 3, as
    verl's default, gives it the value 3 A and no gradient. A token inside, and one with A > 0, keep what they have."""
    logs = [math.log(35), math.log(2), math.log(1.1)]
    advantages = [-1.0, -1.0, 1.0]
    found = {}
    for coefficients in (COEFFICIENTS, DUAL):
        terms = terms_of(logs, advantages, name, torch.float64)
        loss = LOSSES[name](terms, coefficients)
        loss.total.backward()
        weight = float(terms.weights[0])
        found[coefficients.dual_clip] = (
            (-loss.total.detach() / weight).item(),
            (terms.logprobs.grad / weight).tolist(),
            float(loss.clipped) / weight,
        )
    assert found[0.0] == (pytest.approx(-35 - 2 + 1.1), pytest.approx([35, 2, -1.1]), 0)
    assert found[3.0] == (pytest.approx(-3 - 2 + 1.1), pytest.approx([0, 2, -1.1]), 1)


@given(
    st.lists(
        st.tuples(st.floats(-3, 3), st.floats(-2, 2).filter(lambda advantage: advantage == 0 or abs(advantage) > 1e-6)),
        min_size=1,
        max_size=8,
    )
)
def test_the_dual_clip_is_its_formula(found):
    """verl: −A r, −A clip(r), −A c; the maximum of the first two, and where A < 0 the minimum of that and the third."""
    logs, advantages = zip(*found, strict=True)
    ours = LOSSES["dapo"](terms_of(logs, advantages, "dapo", torch.float64), DUAL).total
    total = 0.0
    for log, advantage in found:
        ratio = math.exp(log)
        clipped = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.28))
        total += min(-3.0 * advantage, clipped) if advantage < 0 else clipped
    assert float(ours.detach()) == pytest.approx(total, rel=1e-9, abs=1e-9)


def test_k3_of_a_token_that_the_reference_finds_likely_is_bounded():
    policy = torch.tensor([-29.0, -2.0, -95.0], requires_grad=True)
    reference = torch.tensor([0.0, -1.0, 0.0])
    value = k3(policy, reference)
    assert value.tolist() == pytest.approx([10, math.e - 2, 10])
    value.sum().backward()
    assert policy.grad.tolist() == pytest.approx([0, 1 - math.e, 0])


def test_figures_and_corrections_of_large_ratios_are_finite():
    trainer = torch.tensor([0.0, -800.0])
    rollout = torch.tensor([-800.0, 0.0])
    assert mismatch_figures(trainer, rollout) == (
        pytest.approx(math.exp(20) - 1),
        pytest.approx(math.exp(20) - 20 - 1 + math.exp(-20) + 20 - 1),
    )
    assert correction_weights(trainer - rollout, "truncate", 2.0).tolist() == pytest.approx([2.0, math.exp(-20)])
    assert correction_weights(trainer - rollout, "mask", 2.0).tolist() == [0.0, 0.0]
    tokens = BatchTokens(torch.tensor([800.0, 800.0]), torch.tensor([1.0, -1.0]))
    assert positive_share(tokens, 0.6, 1.2) == pytest.approx(1.2 / (1.2 + math.exp(20)))
    assert balanced_bounds(tokens, COEFFICIENTS) == (0.9, 3.0)
    assert math.isnan(mismatch_figures(torch.tensor([math.nan]), torch.tensor([0.0]))[0])


def test_gspo_reports_the_ratio_that_it_clips():
    logs = [1.0, -0.8]
    loss = LOSSES["gspo"](terms_of(logs, [1.0, 1.0], "gspo"), COEFFICIENTS)
    assert float(loss.ratio_max) == pytest.approx(math.exp(0.1))
    assert float(LOSSES["grpo"](terms_of(logs, [1.0, 1.0]), COEFFICIENTS).ratio_max) == pytest.approx(math.e)


@pytest.mark.parametrize("name", LOSSES)
def test_nan_is_no_largest_ratio_that_another_hides(name):
    loss = LOSSES[name](terms_of([0.1, math.nan, 0.2], [1.0, 1.0, 1.0], name), COEFFICIENTS)
    assert math.isnan(float(loss.ratio_max))


def unbounded(name, terms):
    """The losses as they were before they had bounds."""
    logs = terms.logprobs - terms.old
    ratio = torch.exp(logs)
    low, high = (0.9, 3.0) if name == "bapo" else (1.0 - 0.2, 1.0 + 0.28)
    if name == "m2po":
        return ratio * terms.advantages
    if name == "cispo":
        return ratio.detach().clamp(low, high) * terms.advantages * terms.logprobs
    if name == "gspo":
        sums = torch.zeros(1).index_add_(0, terms.response, logs.detach() * terms.weights)
        ratio = torch.exp(sums[terms.response] + terms.logprobs - terms.logprobs.detach())
    plain = ratio * terms.advantages
    return torch.minimum(plain, ratio.clamp(low, high) * terms.advantages)


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "gspo", "cispo", "m2po", "bapo"])
def test_within_the_bounds_no_bit_changes(name):
    draw = torch.Generator().manual_seed(0)
    for scale in (0.01, 0.3, 3.0):
        logs = (torch.randn(200, generator=draw) * scale).tolist()
        advantages = torch.randn(200, generator=draw).tolist()
        ours, plain = (terms_of(logs, advantages, name) for _ in range(2))
        loss = LOSSES[name](ours, COEFFICIENTS).total
        expected = -(unbounded(name, plain) * plain.weights).sum()
        loss.backward()
        expected.backward()
        assert torch.equal(loss, expected)
        assert torch.equal(ours.logprobs.grad, plain.logprobs.grad)
    policy = torch.randn(200, generator=draw).requires_grad_()
    other = policy.detach().clone().requires_grad_()
    reference = policy.detach() + torch.randn(200, generator=draw) * 0.5
    x = reference - other
    k3(policy, reference).sum().backward()
    (torch.expm1(x) - x).sum().backward()
    assert torch.equal(k3(policy, reference), torch.expm1(x) - x)
    assert torch.equal(policy.grad, other.grad)
