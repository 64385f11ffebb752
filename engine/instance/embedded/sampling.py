"""Samples one token per row, each row with its own temperature, top-k, top-p and random number."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from engine.instance.protocol import Sampling

CACHED = 2**18
"""Number of logits that a thread samples from at a time: the passes over them then read a core's cache, not memory."""


def draw_uniforms(sampling: Sampling) -> list[float]:
    """Return `max_tokens` random numbers in [0, 1), one for each token to sample.

    They depend only on the seed, not on what else is sampled; without one they are different at each call. A continued
    response continues the same sequence.
    """
    seed = int.from_bytes(os.urandom(7)) if sampling.seed is None else sampling.seed
    count = sampling.continued + sampling.max_tokens
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()[sampling.continued :]


def sample_tokens(logits: Tensor, params: list[Sampling], uniforms: list[float]) -> tuple[list[int], list[float]]:
    """Draw one token per row of logits [n, vocabulary]: invert the row's cumulative distribution at its uniform.

    Return the tokens and their log-probabilities. These come from softmax(logits / temperature), before top-k and
    top-p, or from softmax(logits) when greedy. Every operation works row by row, so rows do not depend on each other.
    """
    count = max(1, CACHED * torch.get_num_threads() // logits.shape[1])
    tokens: list[int] = []
    logprobs: list[float] = []
    for first in range(0, len(params), count):
        rows = slice(first, first + count)
        found = _sample_rows(logits[rows], params[rows], uniforms[rows])
        tokens += found[0]
        logprobs += found[1]
    return tokens, logprobs


def _sample_rows(logits: Tensor, params: list[Sampling], uniforms: list[float]) -> tuple[list[int], list[float]]:
    temperature = torch.tensor([p.temperature or 1.0 for p in params])[:, None]
    scaled = logits / temperature
    logprobs = scaled.log_softmax(-1)
    tokens = _invert_cumulative(_restrict_to_top(scaled, params).softmax(-1), torch.tensor(uniforms)[:, None])
    if any(p.temperature == 0 for p in params):
        greedy = torch.tensor([p.temperature == 0 for p in params])[:, None]
        tokens = torch.where(greedy, logits.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0].tolist(), logprobs.gather(1, tokens)[:, 0].tolist()


def _invert_cumulative(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first index [n, 1] at which the cumulated probabilities [n, vocabulary] exceed uniforms [n, 1] · the
    sum."""
    cumulated = probabilities.cumsum(-1)
    total = cumulated[:, -1:]
    # rounding may lift u * total to total, which no entry exceeds; below total, the entry found has a probability > 0
    at = torch.minimum(uniforms * total, total.nextafter(torch.zeros(())))
    # NaN exceeds nothing; the caller sees it in the log-probability
    return torch.searchsorted(cumulated, at, right=True).clamp_(max=probabilities.shape[1] - 1)


def _restrict_to_top(scaled: Tensor, params: list[Sampling]) -> Tensor:
    """Return the logits with -inf outside the top_k most likely tokens and outside the smallest set of tokens that
    holds top_p of the probability."""
    if all(p.top_k == 0 and p.top_p == 1 for p in params):
        return scaled
    vocabulary = scaled.shape[1]
    top_k = torch.tensor([p.top_k or vocabulary for p in params])[:, None]
    top_p = torch.tensor([p.top_p for p in params])[:, None]
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    drop = torch.arange(vocabulary) >= top_k
    kept = ordered.masked_fill(drop, float("-inf")).softmax(-1)
    # a token is dropped if the tokens before it already hold top_p; the first is always kept
    drop |= (kept.cumsum(-1) - kept >= top_p) & (top_p < 1)
    drop[:, 0] = False
    return scaled.masked_fill(drop.gather(-1, order.argsort(-1)), float("-inf"))
