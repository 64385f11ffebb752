import pytest
import torch

from engine.instance.embedded.sampling import draw_uniforms, sample_tokens
from engine.instance.protocol import Sampling


def draw(logits, count, **settings):
    """`count` draws from one row of logits: tokens and log-probabilities."""
    params = Sampling(max_tokens=count, seed=7, **settings)
    return sample_tokens(logits.expand(count, -1), [params] * count, draw_uniforms(params))


def test_greedy_takes_the_most_likely_token():
    logits = torch.randn(20, 33, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = sample_tokens(logits, [Sampling(1, temperature=0.0)] * 20, [0.999] * 20)
    assert tokens == logits.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(logprobs), logits.log_softmax(-1).amax(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_softmax(temperature):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -float("inf"), 0.5])
    tokens, logprobs = draw(logits, 40_000, temperature=temperature)
    expected = (logits / temperature).softmax(-1)
    frequencies = torch.bincount(torch.tensor(tokens), minlength=6) / 40_000
    # four standard deviations of a frequency of 1/2 in 40,000 draws
    torch.testing.assert_close(frequencies, expected, atol=0.01, rtol=0)
    assert frequencies[4] == 0
    torch.testing.assert_close(torch.tensor(logprobs), expected.log()[tokens])


def test_top_k_and_top_p_restrict_but_leave_the_logprobs():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for settings, allowed in (
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.75}, {0, 1}),
        ({"top_p": 0.81}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.6}, {0, 1}),
        ({"top_k": 2, "top_p": 0.6}, {0}),  # top_p is of what top_k leaves, as in vLLM: 5/8 and 3/8
        ({"top_p": 1e-9}, {0}),
        ({"top_k": 9}, {0, 1, 2, 3}),
    ):
        tokens, logprobs = draw(logits, 2000, **settings)
        assert set(tokens) == allowed, settings
        torch.testing.assert_close(torch.tensor(logprobs), logits.log_softmax(-1)[tokens])


def test_a_row_does_not_depend_on_the_others():
    logits = torch.randn(9, 61, generator=torch.Generator().manual_seed(1))
    params = [
        Sampling(1),
        Sampling(1, top_k=3),
        Sampling(1, temperature=0.7),
        Sampling(1, temperature=0.0),
        Sampling(1, top_p=0.4),
        Sampling(1),
        Sampling(1, top_k=1),
        Sampling(1),
        Sampling(1, temperature=2.0),
    ]
    uniforms = torch.rand(9, generator=torch.Generator().manual_seed(2)).tolist()
    tokens, logprobs = sample_tokens(logits, params, uniforms)
    for row in range(9):
        alone = sample_tokens(logits[row : row + 1], params[row : row + 1], uniforms[row : row + 1])
        assert alone == ([tokens[row]], [logprobs[row]])


def test_the_ends_of_the_unit_interval_never_pick_an_impossible_token():
    logits = torch.tensor([[-float("inf"), 0.0, 0.0, -float("inf")]]).expand(2, -1)
    assert sample_tokens(logits, [Sampling(1)] * 2, [0.0, 1.0])[0] == [1, 2]


def test_uniforms_depend_on_the_seed_alone():
    assert draw_uniforms(Sampling(8, seed=3)) == draw_uniforms(Sampling(9, seed=3, top_k=4))[:8]
    assert draw_uniforms(Sampling(8, seed=3)) != draw_uniforms(Sampling(8, seed=4))
