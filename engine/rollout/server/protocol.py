"""The bodies of requests and replies: vLLM's OpenAI-compatible ones, with token ids instead of text."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as repr_short
from typing import Any

from engine.errors import BadInput
from engine.rollout.server.engine import Result
from engine.rollout.server.sampling import Sampling

HUGE = 1e300
SEEDS = range(-(2**63), 2**63)
COMPLETION_KEYS = frozenset({"prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids",
                             "ignore_eos", "n", "logprobs", "return_token_ids", "model", "prompt_logprobs"})


@dataclass(frozen=True)
class Limits:
    """What a model and an instance allow."""

    vocabulary: int
    max_context: int
    stop_ids: frozenset[int]
    """End-of-sequence ids, which always stop unless a request says ignore_eos."""


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object; BadInput for anything else."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadInput("the body must be a JSON object")
    return value


def parse_completion(body: Mapping[str, Any], limits: Limits) -> tuple[tuple[int, ...], Sampling]:
    """Prompt and sampling of a /v1/completions body; BadInput names the first key that can't be served as asked."""
    unknown = sorted(body.keys() - COMPLETION_KEYS)
    if unknown:
        raise BadInput(f"unknown key {repr_short(unknown[0])}; served are {', '.join(sorted(COMPLETION_KEYS))}")
    _fixed(body)
    prompt = _ids(body, "prompt", limits.vocabulary)
    room = limits.max_context - len(prompt)
    if not prompt or room < 1:
        raise BadInput(f"prompt has {len(prompt)} tokens; it must have 1 to {limits.max_context - 1}, "
                       f"to leave room for a response in the context of {limits.max_context}")
    stop = frozenset(_ids(body, "stop_token_ids", limits.vocabulary))
    ignore_eos = body.get("ignore_eos", False)
    if not isinstance(ignore_eos, bool):
        raise BadInput(f"ignore_eos = {repr_short(ignore_eos)}; it must be true or false")
    seed = _integer(body, "seed", None, SEEDS)
    return prompt, Sampling(
        max_tokens=min(_integer(body, "max_tokens", 16, range(1, 2**31)), room),
        temperature=_temperature(body),
        top_p=_top_p(body),
        top_k=max(_integer(body, "top_k", 0, range(-1, 2**31)), 0),
        seed=int.from_bytes(os.urandom(7)) if seed is None else seed,
        stop_ids=stop if ignore_eos else stop | limits.stop_ids,
    )


def wants_prompt_logprobs(body: Mapping[str, Any]) -> bool:
    """Whether a /v1/completions body asks for the log-probabilities of its prompt; BadInput unless by 0 (or null)."""
    return _integer(body, "prompt_logprobs", None, range(1)) is not None


def completion_reply(number: int, model: str, prompt: Sequence[int], result: Result) -> dict[str, Any]:
    """The reply to /v1/completions; `weight_version` is the version that sampled every token of it."""
    choice: dict[str, Any] = {
        "index": 0,
        "text": "",
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "logprobs": {
            "token_logprobs": result.logprobs,
            "tokens": [f"token_id:{token}" for token in result.token_ids],
        },
    }
    if result.prompt_logprobs is not None:
        choice["prompt_logprobs"] = _prompt_logprobs(prompt, result.prompt_logprobs)
    used, prompt_tokens = len(result.token_ids), len(prompt)
    return {
        "id": f"cmpl-{number}",
        "object": "text_completion",
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": used, "total_tokens": prompt_tokens + used},
        "weight_version": result.version,
        "weight_versions": [[0, result.version]] if used else [],
    }


def parse_info(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The init_info or update_info of a body; {} where it is absent."""
    info = body.get(key, {})
    if not isinstance(info, dict):
        raise BadInput(f"{key} = {repr_short(info)}; it must be an object")
    return info


def parse_version(body: Mapping[str, Any]) -> int:
    """The version of a /finish_weight_update body."""
    version = _integer(body, "weight_version", None, range(2**63))
    if version is None:
        raise BadInput('/finish_weight_update needs {"weight_version": N}, N >= 0')
    return version


def _prompt_logprobs(prompt: Sequence[int], values: Sequence[float]) -> list[dict[str, Any] | None]:
    """As vLLM gives them: nothing is known of the first token."""
    return [None, *({str(token): {"logprob": value}} for token, value in zip(prompt[1:], values, strict=True))]


def _fixed(body: Mapping[str, Any]) -> None:
    """Keys with a single served value."""
    for key, value in (("n", 1), ("logprobs", 0), ("return_token_ids", True)):
        given = body.get(key, value)
        if type(given) is not type(value) or given != value:
            raise BadInput(f"{key} = {repr_short(given)}; this engine serves {key} = {json.dumps(value)} only")
    if not isinstance(body.get("model", ""), str):
        raise BadInput(f"model = {repr_short(body['model'])}; it must be a string")


def _ids(body: Mapping[str, Any], key: str, vocabulary: int) -> tuple[int, ...]:
    ids = body.get(key, [])
    if not isinstance(ids, list):
        raise BadInput(f"{key} must be a list of token ids, not {type(ids).__name__}")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise BadInput(f"{key} contains {repr_short(token)}; token ids are integers from 0 to {vocabulary - 1}")
    return tuple(ids)


def _integer(body: Mapping[str, Any], key: str, default: Any, allowed: range) -> Any:  # noqa: ANN401
    value = body.get(key)
    if value is None:
        return default
    if type(value) is not int or value not in allowed:
        raise BadInput(f"{key} = {repr_short(value)}; it must be an integer from {allowed.start} to {allowed.stop - 1}")
    return value


def _number(body: Mapping[str, Any], key: str) -> float:
    value = body.get(key)
    if value is None:
        return 1.0
    if type(value) not in (int, float) or not abs(value) < HUGE:
        raise BadInput(f"{key} = {repr_short(value)}; it must be a finite number")
    return float(value)


def _temperature(body: Mapping[str, Any]) -> float:
    temperature = _number(body, "temperature")
    if temperature != 0 and not 0.01 <= temperature <= 100:  # outside, float32 logits / temperature lose their meaning
        raise BadInput(f"temperature = {temperature!r}; it must be 0 (greedy) or from 0.01 to 100")
    return temperature


def _top_p(body: Mapping[str, Any]) -> float:
    top_p = _number(body, "top_p")
    if not 0 < top_p <= 1:
        raise BadInput(f"top_p = {top_p!r}; it must be above 0 and at most 1")
    return top_p
