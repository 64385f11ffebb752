"""Every loss against NumPy written from the papers, token by token and response by response;
gradients by finite differences."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.algorithm.kl import KL, unbounded_k3
from engine.algorithm.losses import LOSSES, correction_weights, rejection_mask
from engine.config import Algorithm
from support.loss_rows import loss_row

LOW = 0.2
HIGH = 0.28
LONGEST = 10
COEFFICIENTS = Algorithm(clip_low=LOW, clip_high=HIGH)


def with_keys(**keys):
    """COEFFICIENTS with other keys."""
    return COEFFICIENTS.model_copy(update=keys)


responses = st.lists(
    st.tuples(st.floats(-2, 2), st.lists(st.floats(-0.6, 0.6), min_size=1, max_size=6)), min_size=1, max_size=4
)
"""(advantage, log-ratios of the tokens) of each response."""


def terms_of(found, aggregation):
    lengths = torch.tensor([len(logs) for _, logs in found])
    weights = torch.repeat_interleave(1 / lengths.double() if aggregation == "response" else lengths * 0.0 + 1, lengths)
    return loss_row(
        [value for _, row in found for value in row],
        torch.repeat_interleave(torch.tensor([a for a, _ in found], dtype=torch.float64), lengths),
        weights=weights.double(),
        entropy=torch.zeros(len(weights), dtype=torch.float64),
        response=torch.repeat_interleave(torch.arange(len(found)), lengths),
        responses=len(found),
    )


def clipped(ratio, advantage):
    return np.minimum(ratio * advantage, np.clip(ratio, 1 - LOW, 1 + HIGH) * advantage)


def step_loss(name, found):
    """The loss of a step that is these responses, from the papers' sums."""
    per_token = [clipped(np.exp(np.array(logs)), a) for a, logs in found]
    tokens = sum(len(row) for row in per_token)
    if name == "grpo":
        return -np.mean([row.mean() for row in per_token])
    if name == "dapo":
        return -sum(row.sum() for row in per_token) / tokens
    if name == "dr_grpo":
        return -sum(row.sum() for row in per_token) / (len(found) * LONGEST)
    if name == "gspo":
        return -np.mean([clipped(np.exp(np.mean(logs)), a) for a, logs in found])
    if name == "cispo":
        old = np.linspace(-3, -0.5, tokens)
        flat = np.array([value for _, row in found for value in row])
        advantages = np.repeat([a for a, _ in found], [len(row) for _, row in found])
        return -(np.clip(np.exp(flat), 1 - LOW, 1 + HIGH) * advantages * (old + flat)).sum() / tokens
    raise AssertionError(name)


def near_a_kink(name, found):
    edges = np.log([1 - LOW, 1 + HIGH])
    logs = [np.mean(row) for _, row in found] if name == "gspo" else [value for _, row in found for value in row]
    return any(abs(value - edge) < 1e-3 for value in logs for edge in edges)


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "gspo", "cispo"])
@given(found=responses)
def test_the_papers_sums(name, found):
    loss = LOSSES[name]
    terms = terms_of(found, loss.aggregation)
    denominator = loss.denominator(len(found), terms.logprobs.numel(), LONGEST)
    ours = float(loss(terms, COEFFICIENTS).total.detach()) / denominator
    assert ours == pytest.approx(step_loss(name, found), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "gspo"])
@given(found=responses)
def test_gradients_are_finite_differences(name, found):
    if near_a_kink(name, found):
        return
    loss = LOSSES[name]
    terms = terms_of(found, loss.aggregation)
    loss(terms, COEFFICIENTS).total.backward()
    for token in range(terms.logprobs.numel()):
        step = torch.zeros_like(terms.logprobs)
        step[token] = 1e-6
        up, down = (
            float(loss(replace(terms, logprobs=(terms.logprobs + sign * step).detach()), COEFFICIENTS).total)
            for sign in (1, -1)
        )
        assert float(terms.logprobs.grad[token]) == pytest.approx((up - down) / 2e-6, rel=1e-4, abs=1e-6)


@given(found=responses)
def test_cispo_is_a_weighted_policy_gradient(found):
    terms = terms_of(found, "token")
    LOSSES["cispo"](terms, COEFFICIENTS).total.backward()
    ratio = (terms.logprobs - terms.old).detach().exp()
    torch.testing.assert_close(terms.logprobs.grad, -ratio.clamp(1 - LOW, 1 + HIGH) * terms.advantages)


@given(found=responses)
def test_gpg_is_the_policy_gradient_at_every_ratio(found):
    """Its value is −Σ A log π, its gradient −A, wherever the old policy is, and nothing is clipped."""
    terms = terms_of(found, LOSSES["gpg"].aggregation)
    loss = LOSSES["gpg"](terms, COEFFICIENTS)
    loss.total.backward()
    logs = np.linspace(-3, -0.5, len(terms.old)) + np.array([value for _, row in found for value in row])
    advantages = np.repeat([a for a, _ in found], [len(row) for _, row in found])
    assert float(loss.total.detach()) == pytest.approx(-(advantages * logs).sum(), rel=1e-9, abs=1e-12)
    torch.testing.assert_close(terms.logprobs.grad, -terms.advantages)
    assert float(loss.clipped) == 0
    assert LOSSES["gpg"].denominator(len(found), 7, LONGEST) == 7


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "gspo", "cispo", "gpg"])
@given(advantages=st.lists(st.floats(-2, 2), min_size=1, max_size=4))
def test_at_ratio_one_all_are_the_policy_gradient(name, advantages):
    found = [(a, [0.0] * (n + 1)) for n, a in enumerate(advantages)]
    terms = terms_of(found, LOSSES[name].aggregation)
    loss = LOSSES[name](terms, COEFFICIENTS)
    loss.total.backward()
    torch.testing.assert_close(terms.logprobs.grad, -terms.weights * terms.advantages)
    assert float(loss.clipped) == 0


def test_all_tokens_clipped_carry_no_gradient():
    found = [(1.0, [0.5, 0.6]), (-1.0, [-0.5, -0.6])]
    for name in ("grpo", "dapo", "dr_grpo", "gspo"):
        terms = terms_of(found, LOSSES[name].aggregation)
        loss = LOSSES[name](terms, COEFFICIENTS)
        loss.total.backward()
        assert terms.logprobs.grad.abs().sum() == 0, name
        assert float(loss.clipped) == pytest.approx(float(terms.weights.sum())), name


def test_gspo_clips_whole_responses_where_grpo_clips_tokens():
    found = [(1.0, [0.4, -0.4])]  # tokens far off, the sequence's ratio is 1
    token, sequence = (terms_of(found, "response") for _ in range(2))
    LOSSES["grpo"](token, COEFFICIENTS).total.backward()
    LOSSES["gspo"](sequence, COEFFICIENTS).total.backward()
    assert token.logprobs.grad[0] == 0
    torch.testing.assert_close(sequence.logprobs.grad, torch.tensor([-0.5, -0.5], dtype=torch.float64))


@pytest.mark.parametrize("parts", [((0, 2, 4), (1, 3, 5, 6)), ((0, 1, 2, 3, 4), (5, 6)), ((), (0, 1, 2, 3, 4, 5, 6))])
def test_gspo_of_a_row_cut_over_two_context_ranks(parts):
    """With the sums of both ranks each has its part of the whole's gradient, also where one holds nothing of some
    responses: both add up sums of every response of the row, or they would wait for each other for ever."""
    found = [(1.0, [0.1, 0.3, -0.2, 0.1]), (-0.5, [0.05, 0.1]), (0.5, [0.2])]
    whole = terms_of(found, "response")
    LOSSES["gspo"](whole, COEFFICIENTS).total.backward()
    logs = (whole.logprobs - whole.old).detach() * whole.weights
    sums = torch.zeros(3, dtype=torch.float64).index_add_(0, whole.response, logs)
    added = []

    def over_both(mine):
        added.append(mine)
        assert mine.shape == sums.shape
        return sums

    for kept in map(list, parts):
        columns = {
            name: getattr(whole, name).detach()[kept]
            for name in ("logprobs", "old", "entropy", "advantages", "weights", "rollout", "response")
        }
        part = replace(whole, **columns | {"logprobs": columns["logprobs"].requires_grad_()}, whole=over_both)
        LOSSES["gspo"](part, COEFFICIENTS).total.backward()
        torch.testing.assert_close(part.logprobs.grad, whole.logprobs.grad[kept])
    torch.testing.assert_close(sum(added), sums)


def test_kl_estimators_by_hand():
    policy = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    reference = torch.tensor([-1.5, -1.0], dtype=torch.float64)
    x = reference - policy
    assert torch.equal(KL["k1"](policy, reference), -x)
    assert torch.equal(KL["k2"](policy, reference), x**2 / 2)
    torch.testing.assert_close(KL["k3"](policy, reference), x.exp() - x - 1)


@given(st.integers(0, 2**32 - 1))
def test_k1_and_k3_are_unbiased(seed):
    """Their exact expectation under π is KL(π‖π_ref), computed over a vocabulary of 7; but for k3's bound, which acts
    on tokens alone that the reference finds e^2.6 times as likely."""
    draw = torch.Generator().manual_seed(seed)
    policy, reference = torch.randn(2, 7, generator=draw, dtype=torch.float64).log_softmax(-1)
    divergence = (policy.exp() * (policy - reference)).sum()
    for estimate in (KL["k1"], unbounded_k3):
        torch.testing.assert_close((policy.exp() * estimate(policy, reference)).sum(), divergence)
    free = unbounded_k3(policy, reference)
    assert torch.equal(KL["k3"](policy, reference), torch.where(free > 10, torch.tensor(10.0).double(), free))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_enters_the_loss_with_its_coefficient(estimator):
    terms = replace(
        terms_of([(0.0, [0.0, 0.0])], "response"), reference=torch.tensor([-2.0, -1.0], dtype=torch.float64)
    )
    loss = LOSSES["grpo"](terms, with_keys(kl_coef=0.1, kl_estimator=estimator))
    expected = float((KL[estimator](terms.logprobs.detach(), terms.reference) * terms.weights).sum())
    assert float(loss.kl) == pytest.approx(expected)
    assert float(loss.total.detach()) == pytest.approx(0.1 * expected)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@given(pairs=st.lists(st.tuples(st.floats(-4, -0.1), st.floats(-4, -0.1)), min_size=1, max_size=6))
def test_the_gradient_of_every_kl_estimator_is_the_finite_difference(estimator, pairs):
    """Through the loss, with its coefficient and the tokens' weights; nothing else in it (A = 0)."""
    policy, reference = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    terms = terms_of([(0.0, [0.0] * len(pairs))], "response")
    terms = replace(terms, logprobs=policy.clone().requires_grad_(), old=policy, rollout=policy, reference=reference)
    coefficients = with_keys(kl_coef=0.1, kl_estimator=estimator)
    LOSSES["grpo"](terms, coefficients).total.backward()
    for token in range(len(pairs)):
        step = torch.zeros_like(policy)
        step[token] = 1e-6
        up, down = (
            float(LOSSES["grpo"](replace(terms, logprobs=policy + sign * step), coefficients).total) for sign in (1, -1)
        )
        assert float(terms.logprobs.grad[token]) == pytest.approx((up - down) / 2e-6, rel=1e-4, abs=1e-7)


def test_mismatch_corrections_by_hand():
    trainer = torch.tensor([0.0, 1.0, -1.0])
    rollout = torch.zeros(3)
    e = float(np.e)
    logs = trainer - rollout
    assert correction_weights(logs, "truncate", 2.0).tolist() == pytest.approx([1, 2, 1 / e])
    assert correction_weights(logs, "mask", 2.0).tolist() == pytest.approx([1, 0, 0])
    assert correction_weights(logs, "mask", 3.0).tolist() == pytest.approx([1, e, 1 / e])
    assert rejection_mask(logs, 2.0).tolist() == [1, 0, 0]
    assert rejection_mask(logs, 3.0).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="truncate"):
        correction_weights(logs, "clip", 2.0)


LEVELS = {
    "token": lambda logs: logs,
    "sequence": lambda logs: [sum(logs)] * len(logs),
    "geometric": lambda logs: [sum(logs) / len(logs)] * len(logs),
}
"""Log-ratios of a response's trained tokens → those of the level, as verl's rollout correction takes them."""


@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("reject", ["none", "token", "sequence", "geometric"])
@given(found=st.lists(st.lists(st.floats(-1.5, 1.5), min_size=1, max_size=5), min_size=1, max_size=3))
def test_corrections_of_every_level_are_their_formulas(kind, level, reject, found):
    """On-policy in the trainer (r = 1), with an engine that is off by `found`: the gradient is −weight · A · w."""
    terms = terms_of([(1.0 + n, [0.0] * len(logs)) for n, logs in enumerate(found)], "response")
    flat = torch.tensor([value for logs in found for value in logs], dtype=torch.float64)
    terms = replace(terms, rollout=terms.old - flat)
    chosen = {"mismatch": kind, "mismatch_level": level, "mismatch_limit": 2.0}
    chosen |= {"mismatch_reject": reject, "mismatch_reject_limit": 1.5}
    loss = LOSSES["grpo"](terms, with_keys(**chosen))
    loss.total.backward()
    expected = []
    for logs in found:
        bounds = LEVELS[reject](logs) if reject != "none" else [0.0] * len(logs)
        for log, bound in zip(LEVELS[level](logs), bounds, strict=True):
            if min(abs(abs(log) - np.log(2)), abs(abs(bound) - np.log(1.5))) < 1e-9:
                return  # on an edge
            inside = 0.5 <= np.exp(log) <= 2.0
            weight = min(np.exp(log), 2.0) if kind == "truncate" else np.exp(log) * inside
            expected.append(weight * (1 / 1.5 <= np.exp(bound) <= 1.5))
    torch.testing.assert_close(
        terms.logprobs.grad, -terms.weights * terms.advantages * torch.tensor(expected, dtype=torch.float64)
    )
    dropped = [weight for weight, factor in zip(terms.weights.tolist(), expected, strict=True) if factor == 0]
    assert float(loss.dropped) == pytest.approx(sum(dropped))


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_a_responses_ratio_counts_its_trained_tokens_on_all_context_ranks(level):
    terms = terms_of([(1.0, [0.0] * 4), (1.0, [0.0] * 2)], "token")
    logs = torch.tensor([0.5, -0.1, 9.0, 0.2, 0.3, -0.4], dtype=torch.float64)
    terms = replace(terms, weights=torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.float64))
    sums = [0.5 - 0.1 + 0.2, 0.3 - 0.4]
    expected = sums if level == "sequence" else [sums[0] / 3, sums[1] / 2]
    whole = terms.at_level(logs, level)
    assert whole.tolist() == pytest.approx([expected[0]] * 4 + [expected[1]] * 2)
    shares = ([0, 2, 4], [1, 3, 5])
    parts = [
        replace(terms, weights=terms.weights[kept], response=terms.response[kept], whole=lambda mine: mine)
        for kept in shares
    ]
    added = {}

    def told(name):
        def over_both(mine):
            added.setdefault(name, []).append(mine)
            return mine

        return over_both

    for name, (part, kept) in enumerate(zip(parts, shares, strict=True)):
        replace(part, whole=told(name)).at_level(logs[kept], level)
    both = [one + other for one, other in zip(added[0], added[1], strict=True)]
    for part, kept in zip(parts, shares, strict=True):
        left = iter(both)
        found = replace(part, whole=lambda mine, left=left: next(left)).at_level(logs[kept], level)
        torch.testing.assert_close(found, whole[kept])


def test_a_corrected_gain_is_weighted_and_the_weight_has_no_gradient():
    terms = terms_of([(1.0, [0.0, 0.0])], "response")
    terms = replace(terms, rollout=terms.old - torch.tensor([0.5, 2.0], dtype=torch.float64))
    LOSSES["grpo"](terms, with_keys(mismatch="truncate", mismatch_limit=3.0)).total.backward()
    assert terms.logprobs.grad.tolist() == pytest.approx([-0.5 * np.exp(0.5), -0.5 * 3.0])


def test_off_policy_the_correction_is_that_of_the_weights_that_sampled():
    """TIS eq. 4: r = π/π_old is what the policy has moved, w = π_old/π_rollout what the engine is off;
    each counts once."""
    terms = terms_of([(1.0, [0.1, -0.1])], "response")
    old = terms.old
    terms = replace(terms, rollout=old - torch.tensor([0.5, -0.5], dtype=torch.float64), sampled=old)
    LOSSES["grpo"](terms, with_keys(mismatch="truncate", mismatch_limit=3.0)).total.backward()
    expected = [-0.5 * np.exp(moved) * np.exp(off) for moved, off in ((0.1, 0.5), (-0.1, -0.5))]
    assert terms.logprobs.grad.tolist() == pytest.approx(expected)
