"""Conversion of a checked completion to vLLM's sampling parameters, and of vLLM's output to a result."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.instance.protocol import Completion
from engine.instance.refusals import Refusal
from engine.instance.replies import Result
from engine.model.shape import Experts
from engine.wire.routes import route_type

LEAST = -9999.0
"""vLLM's value for a log-probability of minus infinity, which JSON does not have."""


def arguments(asked: Completion) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams for a completion."""
    found: dict[str, Any] = {
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "stop_token_ids": sorted(asked.stop_ids),
        "ignore_eos": True,  # the ids above stop; vLLM has no tokenizer that knows others
        "detokenize": False,
        "logprobs": 0,
    }
    if asked.seed is not None:
        found["seed"] = _request_seed(asked.seed, asked.continued)
    if asked.prompt_logprobs:
        found["prompt_logprobs"] = 0
    return found


def _request_seed(seed: int, continued: int) -> int:
    """Return the seed for vLLM, which begins a random sequence with each request. A continued response gets another
    seed, since it must not draw its first numbers again."""
    if not continued:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {continued}".encode()).digest()[:8], "big") >> 1


def result(output: Any, version: int, experts: Experts | None = None) -> Result:  # noqa: ANN401
    """Return the result in vLLM's RequestOutput. It lacks the prompt's log-probabilities if the request was aborted
    before they were computed. `experts`: the model's, if the tokens' are asked for."""
    sampled = output.outputs[0]
    tokens = list(sampled.token_ids)
    scores = output.prompt_logprobs
    return Result(
        token_ids=tokens,
        logprobs=_logprobs(sampled.logprobs or [], tokens),
        finish_reason=sampled.finish_reason,
        version=version,
        prompt_logprobs=_logprobs(scores[1:], output.prompt_token_ids[1:]) if scores else None,
        routes=_routes(sampled.routed_experts, experts) if experts and tokens else None,
    )


def _routes(found: Any, experts: Experts) -> NDArray[Any]:  # noqa: ANN401
    """Return vLLM's [tokens, layers, experts per token] without the layers that have no experts. Raise Refusal if there
    are none."""
    if found is None:
        raise Refusal(500, "vLLM returned no experts (routed_experts), though it was started to (--routes)")
    return np.ascontiguousarray(found[:, list(experts.layers)], dtype=route_type(experts.count))


def _logprobs(entries: Any, tokens: list[int]) -> list[float]:  # noqa: ANN401
    """Return each token's log-probability from vLLM's {token: Logprob, …} for each position; NaN stays NaN."""
    return [max(entry[token].logprob, LEAST) for entry, token in zip(entries, tokens, strict=True)]
