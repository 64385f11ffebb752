"""The check of every vLLM instance at its start: its log-probabilities are log softmax(logits / temperature), before
top-k and top-p, of every sampled token.

An engine may accept a setting and ignore it (vllm-ascend 0.23: --logprobs-mode), and nothing else would notice at a
temperature other than 1. The instance answers through its own routes. For the tokens t at one position,
log-probability(t) - log p(t) / temperature is the same number, however t was sampled; log p is what the instance
reports for a token of a prompt, at temperature 1. One of the tokens drawn at a position may be off: in a mixture of
experts a router near a tie may choose other experts when it sees the same token in a batch of another shape.
"""

from __future__ import annotations

import math
from statistics import median

from engine.errors import BadInput
from engine.instance.vllm.batch_invariance import COMPLETIONS, Ask, sampled_tokens

TEMPERATURE = 2.0
"""vLLM's highest. Sampled tokens differ, and the most likely one is far from certain."""
MOST_LIKELY = 1e-6
"""A top_p that leaves the most likely token only."""
TOKENS = 3
DRAWS = 4
"""Tokens sampled from the whole vocabulary at each position."""
TOLERANCE = 0.25
"""Largest difference of numbers that must be equal; by bfloat16 about 0.1. Other quantities are off by 1 to 5 with
models of language."""


def check_logprobs(ask: Ask, platform: str) -> None:
    """Sample tokens with and without top_p, and compare their log-probabilities with those of the same tokens in a
    prompt. Raise BadInput if the instance reports another quantity. `platform`: its name in the message."""
    restricted = _sample(ask, [0], tokens=TOKENS, top_p=MOST_LIKELY)
    for at, (token, logprob) in enumerate(restricted):
        start = [0, *(before for before, _ in restricted[:at])]
        drawn = [_sample(ask, start, seed=seed)[0] for seed in range(DRAWS)]
        found = [(given, _score(ask, [*start, one])) for one, given in ((token, logprob), *drawn)]
        offsets = [given - score / TEMPERATURE for given, score in found]
        usual = median(offsets[1:])
        apart = [abs(offset - usual) for offset in offsets]
        if not (all(map(math.isfinite, offsets)) and max(apart[0], median(apart[1:])) <= TOLERANCE):
            right = logprob - offsets[0] + usual
            raise BadInput(
                f"{platform} reports {_quantity(found)}, and not log softmax(logits / temperature) of the whole "
                f"vocabulary, which is trained on: {logprob:.4g} for token {token} after {start} at temperature "
                f"{TEMPERATURE:g} with top_p = {MOST_LIKELY:g}, expected {right:.4g}. Use a release that infra/vllm "
                "names; Metronome changes the samplers of those"
            )


def _agree(values: list[float]) -> bool:
    """Whether the values are equal but for rounding; NaN equals nothing."""
    return all(abs(value - values[0]) <= TOLERANCE for value in values)


def _quantity(found: list[tuple[float, float]]) -> str:
    """Name what is reported. `found`: log-probability and log p, first of the token sampled with top_p."""
    if _agree([logprob - score for logprob, score in found]):
        return "log-probabilities before the temperature (raw_logprobs)"
    if _agree([logprob - score / TEMPERATURE for logprob, score in found[1:]]):
        return "log-probabilities after top_p (processed_logprobs)"
    return "an unknown quantity"


def _sample(ask: Ask, prompt: list[int], tokens: int = 1, **body: float) -> list[tuple[int, float]]:
    """Return sampled tokens with their log-probabilities."""
    request = {"prompt": prompt, "max_tokens": tokens, "temperature": TEMPERATURE, "ignore_eos": True, **body}
    return sampled_tokens(ask("POST", COMPLETIONS, request))


def _score(ask: Ask, prompt: list[int]) -> float:
    """Return log p of a prompt's last token, at temperature 1."""
    request = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0, "ignore_eos": True}
    reply = ask("POST", COMPLETIONS, request)
    return float(reply["choices"][0]["prompt_logprobs"][-1][str(prompt[-1])]["logprob"])
