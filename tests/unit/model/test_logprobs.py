"""Log-probabilities and entropies against closed forms, double-precision autograd and finite differences; one rank."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


def of_logits(logits, targets, temperature, **settings):
    """token_logprobs of given logits: the weight is the identity, so that the product is exact."""
    return token_logprobs(logits, torch.eye(logits.shape[1], dtype=logits.dtype), targets, temperature, **settings)


def test_closed_form():
    """Probabilities 1/2, 1/4, 1/4 at temperature 1; 2/3, 1/6, 1/6 → p^(1/τ) normalised at others."""
    logits = torch.tensor([[math.log(4.0), math.log(2.0), math.log(2.0)], [0.0, 0.0, 0.0]])
    logs, entropy = of_logits(logits, torch.tensor([0, 2]), 1.0)
    torch.testing.assert_close(logs, torch.tensor([-math.log(2), -math.log(3)]))
    torch.testing.assert_close(entropy, torch.tensor([1.5 * math.log(2), math.log(3)]))
    logs, entropy = of_logits(logits, torch.tensor([1, 0]), 0.5)  # 16 : 4 : 4
    torch.testing.assert_close(logs, torch.tensor([-math.log(6), -math.log(3)]))
    torch.testing.assert_close(entropy[0], torch.tensor(2 / 3 * math.log(1.5) + 1 / 3 * math.log(6)))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 7, 50, None])
@pytest.mark.parametrize(("width", "vocabulary"), [(130, None), (130, 130), (136, 130)])
def test_values_and_gradients_are_those_of_log_softmax(temperature, chunk, width, vocabulary):
    logits, targets = draw(50, width, limit=vocabulary)
    theirs = expected(logits, targets, temperature, vocabulary)
    ours = of_logits(logits=logits, targets=targets, temperature=temperature, vocabulary=vocabulary, chunk=chunk)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine.double(), other, rtol=1e-6, atol=2e-6)
    of = torch.randn(2, 50, dtype=torch.float64)
    for weights in ((of[0], None), (None, of[1]), (of[0], of[1])):
        ours = of_logits(logits=logits, targets=targets, temperature=temperature, vocabulary=vocabulary, chunk=chunk)
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
    ours = of_logits(logits, targets, 0.7)
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
        for of, one in ((expected, wide), (of_logits, logits))
    )
    torch.testing.assert_close(found, wanted, rtol=2**-8, atol=1e-5)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[3e4, -3e4, 0.0], [-1e30, 0.0, -1e30]], requires_grad=True)
    logs, entropy = of_logits(logits, torch.tensor([1, 1]), 0.7)
    torch.testing.assert_close(logs, torch.tensor([-6e4 / 0.7, 0.0]))
    torch.testing.assert_close(entropy, torch.zeros(2))
    (logs.sum() + entropy.sum()).backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]) / 0.7)


def test_nothing_to_score():
    logits = torch.zeros(0, 9, requires_grad=True)
    logs, entropy = of_logits(logits, torch.zeros(0, dtype=torch.long), 1.0)
    assert logs.shape == entropy.shape == (0,)
    (logs.sum() + entropy.sum()).backward()
    assert logits.grad.shape == (0, 9)


def test_scoring_gives_the_same_numbers_and_entropy_can_be_left_out():
    logits, targets = draw(20, 33)
    with torch.no_grad():
        logs, nothing = of_logits(logits, targets, 0.7, entropy=False)
    assert nothing is None
    torch.testing.assert_close(logs, of_logits(logits, targets, 0.7)[0].detach(), rtol=0, atol=1e-6)
    trained, nothing = of_logits(logits, targets, 0.7, entropy=False)
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
    ours = of_logits(logits=logits, targets=targets, temperature=temperature, vocabulary=width, chunk=chunk)
    theirs = expected(logits, targets, temperature, width)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=2e-6, atol=2e-5)
    torch.testing.assert_close(gradient(logits, ours, of), gradient(logits, theirs, of), rtol=1e-4, atol=2e-4)


DRAWN = {
    "tokens": st.integers(0, 13),
    "hidden": st.integers(1, 9),
    "width": st.integers(1, 40),
    "padding": st.integers(0, 5),
    "chunk": st.sampled_from([1, 4, 5, 13, None]),
    "temperature": st.sampled_from([0.3, 1.0, 1.7]),
    "entropy": st.booleans(),
    "sums": st.booleans(),
    "dtype": st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    "wide": st.booleans(),
    "seed": st.integers(0, 10**6),
}


@settings(max_examples=150, deadline=None)
@given(**DRAWN)
def test_chunks_of_tokens_give_what_whole_logits_give(
    tokens, hidden, width, padding, chunk, temperature, entropy, sums, dtype, wide, seed
):
    """Values, and the gradients of hidden states and weight, in fp64 from the logits that the dtype has."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, hidden), (width + padding, hidden))
    x, weight = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    targets = torch.randint(width, (tokens,), generator=generator)
    of = torch.randn(2, tokens, dtype=torch.float64, generator=generator)
    if sums:  # as Megatron's fp32 sum of several micro-batches
        weight.main_grad = torch.full(weight.shape, 0.5, dtype=torch.promote_types(dtype, torch.float32))
    ours = token_logprobs(x, weight, targets, temperature, vocabulary=width, chunk=chunk, entropy=entropy, wide=wide)
    weights = [of[0], of[1] if entropy else None]
    sum((out * one).sum() for out, one in zip(ours, weights, strict=True) if one is not None).backward()

    a, b = (one.detach().double().requires_grad_() for one in (x, weight))
    exact = a @ b.t()
    rounded = exact if wide else exact + (exact.detach().to(dtype).double() - exact.detach())
    theirs = expected(rounded, targets, temperature, width)
    gradient_of = torch.autograd.grad(
        sum((out * one).sum() for out, one in zip(theirs, weights, strict=True) if one is not None), (a, b)
    )
    to_weight = weight.grad if not sums else weight.main_grad - 0.5
    assert not sums or weight.grad is None
    assert (x.grad.dtype, to_weight.dtype) == (dtype, weight.main_grad.dtype if sums else dtype)
    near = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    for mine, other in ((ours[0], theirs[0]), *([(ours[1], theirs[1])] if entropy else [])):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-10 if dtype is torch.float64 else 2e-5)
    for mine, other in zip((x.grad, to_weight), gradient_of, strict=True):
        assert (mine - other).norm() <= near * other.norm() + near


def test_only_one_chunk_of_logits_is_in_memory():
    """Everything that a pass over eight chunks makes is smaller than all logits, and nothing of their size is kept."""
    x, weight = (torch.randn(shape).requires_grad_() for shape in ((1024, 4), (1000, 4)))
    targets = torch.randint(1000, (1024,))
    made = Largest()
    with made:
        logs, entropy = token_logprobs(x, weight, targets, 0.7, chunk=128)
        (logs.sum() + entropy.sum()).backward()
    assert made.numbers == 128 * 1000
    wanted = expected(x @ weight.t(), targets, 0.7)
    assert_near(logs, wanted[0])


class Largest(TorchDispatchMode):
    """Remembers the size of the largest output of any operation."""

    numbers = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        sizes = [one.untyped_storage().nbytes() // one.itemsize for one in tree_leaves(found) if torch.is_tensor(one)]
        self.numbers = max(self.numbers, *sizes, 0)
        return found


def assert_near(ours, theirs):
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("chunk", [37, None])
def test_wide_logits_are_not_rounded_and_gradients_are_those_of_a_bf16_layer(chunk):
    torch.manual_seed(0)
    x, weight = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((64, 64), (100, 64)))
    targets = torch.randint(100, (64,))
    exact = x.detach().double() @ weight.detach().double().t()
    ours, rounded = (token_logprobs(x, weight, targets, 1.0, wide=wide, chunk=chunk)[0] for wide in (True, False))
    wanted = expected(exact, targets, 1.0)[0]
    assert (ours - wanted).abs().max() < 1e-4
    assert (rounded - wanted).abs().max() > 1e-2  # what a bf16 layer loses
    for mine, other in zip(
        torch.autograd.grad(ours.sum(), (x, weight)),
        torch.autograd.grad(expected(x.double() @ weight.double().t(), targets, 1.0)[0].sum(), (x, weight)),
        strict=True,
    ):
        assert mine.dtype is torch.bfloat16
        assert (mine - other).norm() <= 1e-2 * other.norm()
