"""Parsers for the request bodies of an instance, shared by both engines. An error names the malformed key.

They need only the standard library, since they also run in vLLM's environment.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from reprlib import repr as repr_short
from typing import Any
from urllib.parse import parse_qs

from engine.errors import BadInput
from engine.types import JsonObject

HUGE = 1e300
DEFAULT_TOKENS = 16
"""max_tokens of a request that does not name it."""
SEEDS = range(-(2**63), 2**63)
COMPLETION_KEYS = frozenset(
    {
        "prompt",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop_token_ids",
        "ignore_eos",
        "n",
        "logprobs",
        "return_token_ids",
        "model",
        "prompt_logprobs",
        "continued",
        "routes",
    }
)
FIXED = {"n": 1, "logprobs": 0, "return_token_ids": True, "prompt_logprobs": 0}
"""The only supported value of each of these keys. A key may also be absent or null."""


@dataclass(frozen=True)
class RequestLimits:
    """The limits that a model and an instance set for requests."""

    vocabulary: int
    max_context: int
    stop_ids: frozenset[int]
    """End-of-sequence ids of the model. They end a response unless the request sets ignore_eos."""
    routes: bool = False
    """Whether the engine can report which experts computed a token."""


@dataclass(frozen=True)
class Sampling:
    """How a response is sampled."""

    max_tokens: int
    """Most tokens to sample."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 turns it off."""
    seed: int | None = 0
    stop_ids: frozenset[int] = frozenset()
    """The first of these ids ends the response."""
    continued: int = 0
    """Number of the prompt's last tokens that belong to the response: its random numbers continue after them."""


@dataclass(frozen=True, kw_only=True)
class Completion(Sampling):
    """A checked body of /v1/completions. Prompt and response fit into the context, and `stop_ids` include the model's
    end-of-sequence ids unless the request sets ignore_eos."""

    prompt: tuple[int, ...]
    prompt_logprobs: bool = False
    """Whether the prompt's log-probabilities are requested."""
    routes: bool = False
    """Whether the experts of each token are requested."""


def parse_object(body: bytes | bytearray) -> JsonObject:
    """Return the JSON object in a body. Raise BadInput for anything else."""
    try:
        text = body.decode()
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair can't be encoded for other processes
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadInput("the body must be a JSON object")
    return value


def has_text(body: Mapping[str, Any]) -> bool:
    """Whether the prompt of a /v1/completions body is text, or a list that begins with text."""
    prompt = body.get("prompt")
    return isinstance(prompt, str) or (isinstance(prompt, list) and prompt[:1] != [] and isinstance(prompt[0], str))


def parse_completion(body: Mapping[str, Any], limits: RequestLimits) -> Completion:
    """Return a checked /v1/completions body. Raise BadInput, which names the first key that can't be served as
    requested."""
    if unknown := sorted(body.keys() - COMPLETION_KEYS):
        raise BadInput(f"unknown key {repr_short(unknown[0])}; known keys are {', '.join(sorted(COMPLETION_KEYS))}")
    _check_fixed_keys(body)
    prompt = _token_ids(body, "prompt", limits.vocabulary)
    room = limits.max_context - len(prompt)
    if not prompt or room < 1:
        raise BadInput(
            f"prompt has {len(prompt)} tokens; it must have 1 to {limits.max_context - 1}, "
            f"to leave room for a response in the context of {limits.max_context}"
        )
    stop = frozenset(_token_ids(body, "stop_token_ids", limits.vocabulary))
    ignore_eos = body.get("ignore_eos", False)
    if not isinstance(ignore_eos, bool):
        raise BadInput(f"ignore_eos = {repr_short(ignore_eos)}; it must be true or false")
    routes = body.get("routes", False)
    if not isinstance(routes, bool):
        raise BadInput(f"routes = {repr_short(routes)}; it must be true or false")
    if routes and not limits.routes:
        raise BadInput(
            "routes = true: this instance does not record the experts of tokens; only vLLM does, with a mixture of "
            "experts, started by a recipe with algorithm.routing_replay = true (--routes)"
        )
    return Completion(
        prompt=prompt,
        max_tokens=min(_integer(body, "max_tokens", DEFAULT_TOKENS, range(1, 2**31)), room),
        # outside, float32 logits / temperature are useless
        temperature=_number(
            body, "temperature", lambda value: value == 0 or 0.01 <= value <= 100, "0 (greedy) or from 0.01 to 100"
        ),
        top_p=_number(body, "top_p", lambda value: 0 < value <= 1, "above 0 and at most 1"),
        top_k=max(_integer(body, "top_k", 0, range(-1, 2**31)), 0),
        seed=_integer(body, "seed", None, SEEDS),
        stop_ids=stop if ignore_eos else stop | limits.stop_ids,
        prompt_logprobs=body.get("prompt_logprobs") is not None,
        continued=_integer(body, "continued", 0, range(len(prompt))),
        routes=routes,
    )


def parse_info(body: Mapping[str, Any], key: str) -> JsonObject:
    """Return the object under `key` (init_info or update_info) of a body; {} if it is absent."""
    info = body.get(key, {})
    if not isinstance(info, dict):
        raise BadInput(f"{key} = {repr_short(info)}; it must be an object")
    return info


def parse_abort(query: str) -> bool:
    """Return whether the `mode` of a pause is "abort", the default, and not "wait"."""
    modes = parse_qs(query, keep_blank_values=True).get("mode", ["abort"])
    if modes not in (["abort"], ["wait"]):
        raise BadInput(f"mode = {', '.join(modes)!r}; it must be abort or wait, once")
    return modes == ["abort"]


def parse_finish(body: Mapping[str, Any], limits: RequestLimits) -> tuple[int, tuple[int, ...]]:
    """Return the version in a /finish_weight_update body, and the tokens of its probe. Raise BadInput if the version is
    absent."""
    version: int | None = _integer(body, "weight_version", None, range(2**63))
    if version is None:
        raise BadInput('/finish_weight_update needs {"weight_version": N}, N >= 0')
    probe = _token_ids(body, "probe", limits.vocabulary)
    if len(probe) == 1 or len(probe) >= limits.max_context:
        raise BadInput(f"probe has {len(probe)} tokens; it must have 2 to {limits.max_context - 1}, or none")
    return version, probe


def _check_fixed_keys(body: Mapping[str, Any]) -> None:
    for key, value in FIXED.items():
        given = body.get(key)
        if given is not None and (type(given) is not type(value) or given != value):
            raise BadInput(f"{key} = {repr_short(given)}; only {key} = {json.dumps(value)} is served")
    if not isinstance(body.get("model", ""), str):
        raise BadInput(f"model = {repr_short(body['model'])}; it must be a string")


def _token_ids(body: Mapping[str, Any], key: str, vocabulary: int) -> tuple[int, ...]:
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


def _number(body: Mapping[str, Any], key: str, fits: Callable[[float], bool], words: str) -> float:
    value = body.get(key)
    if value is None:
        return 1.0
    if type(value) not in (int, float) or not abs(value) < HUGE or not fits(value):
        raise BadInput(f"{key} = {repr_short(value)}; it must be {words}")
    return float(value)
