"""Log-probabilities and entropies against closed forms, double-precision autograd and finite differences; one rank."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.logprobs import token_logprobs


def expected(logits, targets, temperature, vocabulary=None):
    """By torch in fp64: log-probabilities and entropies, differentiable."""
    logs = torch.log_softmax(logits[:, :vocabulary].double() / temperature, -1)
    return logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def draw(tokens, width, seed=0, scale=3.0, dtype=torch.float32, limit=None):
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(tokens, width, generator=generator, dtype=torch.float64)).to(dtype)
    return logits.requires_grad_(), torch.randint(limit or width, (tokens,), generator=generator)


def gradient(logits, outputs, weights):
    """Of Σ weight · output over the outputs that have weights."""
    total = sum(
        (out.double() * weight).sum() for out, weight in zip(outputs, weights, strict=True) if weight is not None
    )
    return torch.autograd.grad(total, logits)[0]


def test_closed_form():
    """Probabilities 1/2, 1/4, 1/4 at temperature 1; 2/3, 1/6, 1/6 → p^(1/τ) normalised at others."""
    logits = torch.tensor([[math.log(4.0), math.log(2.0), math.log(2.0)], [0.0, 0.0, 0.0]])
    logs, entropy = token_logprobs(logits, torch.tensor([0, 2]), 1.0)
    torch.testing.assert_close(logs, torch.tensor([-math.log(2), -math.log(3)]))
    torch.testing.assert_close(entropy, torch.tensor([1.5 * math.log(2), math.log(3)]))
    logs, entropy = token_logprobs(logits, torch.tensor([1, 0]), 0.5)  # 16 : 4 : 4
    torch.testing.assert_close(logs, torch.tensor([-math.log(6), -math.log(3)]))
    torch.testing.assert_close(entropy[0], torch.tensor(2 / 3 * math.log(1.5) + 1 / 3 * math.log(6)))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 7, 50, None])
@pytest.mark.parametrize(("width", "vocabulary"), [(130, None), (130, 130), (136, 130)])
def test_values_and_gradients_are_those_of_log_softmax(temperature, chunk, width, vocabulary):
    logits, targets = draw(50, width, limit=vocabulary)
    theirs = expected(logits, targets, temperature, vocabulary)
    ours = token_logprobs(logits=logits, targets=targets, temperature=temperature, vocabulary=vocabulary, chunk=chunk)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine.double(), other, rtol=1e-6, atol=2e-6)
    of = torch.randn(2, 50, dtype=torch.float64)
    for weights in ((of[0], None), (None, of[1]), (of[0], of[1])):
        ours = token_logprobs(
            logits=logits, targets=targets, temperature=temperature, vocabulary=vocabulary, chunk=chunk
        )
        wanted = gradient(logits, expected(logits, targets, temperature, vocabulary), weights)
        torch.testing.assert_close(gradient(logits, ours, weights), wanted, rtol=1e-5, atol=1e-6)


def test_bf16_logits_are_computed_in_fp32():
    """The values are exact for the rounded logits; the gradient is rounded once,
    also at a target that is almost certain."""
    logits, targets = draw(64, 200, dtype=torch.bfloat16)
    with torch.no_grad():
        logits[torch.arange(32), targets[:32]] += (
            20.0  # p = 1 − tiny: 1 − p must not be a difference of rounded numbers
        )
    ours = token_logprobs(logits, targets, 0.7)
    theirs = expected(logits, targets, 0.7)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-6, atol=4e-6)
    ones = torch.ones(64, dtype=torch.float64)
    wide = logits.detach().double().requires_grad_()
    wanted = gradient(wide, expected(wide, targets, 0.7), (ones, ones))
    found = gradient(logits, ours, (ones, ones))
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-6)


def test_bf16_logits_are_scaled_in_fp32_without_the_entropys_gradient_too():
    """A logit of 20 over a temperature, rounded to bf16, would be wrong by up to 0.06, and its probability by 6 %."""
    logits, targets = draw(64, 200, dtype=torch.bfloat16)
    with torch.no_grad():
        logits.mul_(4.0)
        logits[:, :20] += 20.0
    wide = logits.detach().double().requires_grad_()
    wanted, found = (
        torch.autograd.grad(of(one, targets, 0.7)[0].sum(), one)[0].double()
        for of, one in ((expected, wide), (token_logprobs, logits))
    )
    torch.testing.assert_close(found, wanted, rtol=2**-8, atol=1e-5)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[3e4, -3e4, 0.0], [-1e30, 0.0, -1e30]], requires_grad=True)
    logs, entropy = token_logprobs(logits, torch.tensor([1, 1]), 0.7)
    torch.testing.assert_close(logs, torch.tensor([-6e4 / 0.7, 0.0]))
    torch.testing.assert_close(entropy, torch.zeros(2))
    (logs.sum() + entropy.sum()).backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]) / 0.7)


def test_nothing_to_score():
    logits = torch.zeros(0, 9, requires_grad=True)
    logs, entropy = token_logprobs(logits, torch.zeros(0, dtype=torch.long), 1.0)
    assert logs.shape == entropy.shape == (0,)
    (logs.sum() + entropy.sum()).backward()
    assert logits.grad.shape == (0, 9)


def test_scoring_gives_the_same_numbers_and_entropy_can_be_left_out():
    logits, targets = draw(20, 33)
    with torch.no_grad():
        logs, nothing = token_logprobs(logits, targets, 0.7, entropy=False)
    assert nothing is None
    torch.testing.assert_close(logs, token_logprobs(logits, targets, 0.7)[0].detach(), rtol=0, atol=1e-6)
    trained, nothing = token_logprobs(logits, targets, 0.7, entropy=False)
    assert nothing is None
    ones = torch.ones(20, dtype=torch.float64)
    wanted = gradient(logits, expected(logits, targets, 0.7), (ones, None))
    torch.testing.assert_close(gradient(logits, (trained,), (ones,)), wanted, rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 9),
    width=st.integers(1, 40),
    padding=st.integers(0, 5),
    chunk=st.integers(1, 12),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    scale=st.sampled_from([0.0, 1.0, 20.0]),
    seed=st.integers(0, 10**6),
)
def test_any_shape(tokens, width, padding, chunk, temperature, scale, seed):
    logits, targets = draw(tokens, width + padding, seed, scale, limit=width)
    of = torch.randn(2, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    ours = token_logprobs(logits=logits, targets=targets, temperature=temperature, vocabulary=width, chunk=chunk)
    theirs = expected(logits, targets, temperature, width)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=2e-6, atol=2e-5)
    torch.testing.assert_close(gradient(logits, ours, of), gradient(logits, theirs, of), rtol=1e-4, atol=2e-4)
