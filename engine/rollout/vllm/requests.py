"""Bodies of requests, checked before vLLM sees them: what is malformed is refused here, with 4xx and without effect."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

from engine.errors import BadInput

KEYS = frozenset({"prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids", "ignore_eos", "n",
                  "logprobs", "return_token_ids", "prompt_logprobs", "model"})
FIXED = {"n": 1, "logprobs": 0, "return_token_ids": True, "prompt_logprobs": 0}
SEEDS = range(-(2**63), 2**63)


@dataclass(frozen=True)
class Limits:
    """What the model and the instance allow."""

    vocabulary: int
    max_context: int
    stop_ids: frozenset[int]
    """End-of-sequence ids, which always stop unless a request says ignore_eos."""


def json_object(body: bytes) -> dict[str, Any]:
    """The body as an object (an empty body as {}); BadInput for anything else."""
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadInput("the body must be a JSON object")
    return value


def completion(body: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """The body vLLM gets for a /v1/completions of ours. BadInput names the first key that can't be served as asked."""
    if unknown := sorted(body.keys() - KEYS):
        raise BadInput(f"unknown key {short(unknown[0])}; served are {', '.join(sorted(KEYS))}")
    _fixed(body)
    prompt = _ids(body, "prompt", limits.vocabulary)
    room = limits.max_context - len(prompt)
    if not prompt or room < 1:
        raise BadInput(f"prompt has {len(prompt)} tokens; it must have 1 to {limits.max_context - 1}, "
                       f"to leave room for a response in the context of {limits.max_context}")
    ignore_eos = body.get("ignore_eos", False)
    if not isinstance(ignore_eos, bool):
        raise BadInput(f"ignore_eos = {short(ignore_eos)}; it must be true or false")
    stop = set(_ids(body, "stop_token_ids", limits.vocabulary)) | (set() if ignore_eos else limits.stop_ids)
    top_p = _number(body, "top_p")
    if not 0 < top_p <= 1:
        raise BadInput(f"top_p = {top_p!r}; it must be above 0 and at most 1")
    asked = {
        "prompt": prompt,
        "max_tokens": min(_integer(body, "max_tokens", range(1, 2**31), 16), room),
        "temperature": _temperature(body),
        "top_p": top_p,
        "top_k": max(_integer(body, "top_k", range(-1, 2**31), 0), 0),
        "stop_token_ids": sorted(stop),
        "ignore_eos": True,  # the ids above stop; vLLM has no tokenizer that knows another
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    given = {"seed": _integer(body, "seed", SEEDS, None), "prompt_logprobs": body.get("prompt_logprobs")}
    return asked | {key: value for key, value in given.items() if value is not None}


def version(body: Mapping[str, Any], needed: bool = True) -> int | None:
    """`weight_version` of a body."""
    value = _integer(body, "weight_version", range(2**63), None)
    if value is None and needed:
        raise BadInput('/finish_weight_update needs {"weight_version": N}, N >= 0')
    return value


def info(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object under `key` of a weight route's body."""
    value = body.get(key)
    if not isinstance(value, dict):
        raise BadInput(f'the body must hold an object "{key}"')
    return value


def stop_ids(model: Path) -> frozenset[int]:
    """End-of-sequence ids of a Hugging Face folder: of generation_config.json and config.json."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (model / name).is_file():
            ids = json.loads((model / name).read_text()).get("eos_token_id")
            found |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)


def _fixed(body: Mapping[str, Any]) -> None:
    """Keys with a single served value."""
    for key, value in FIXED.items():
        given = body.get(key)
        if given is not None and (type(given) is not type(value) or given != value):
            raise BadInput(f"{key} = {short(given)}; only {key} = {json.dumps(value)} is served")
    if not isinstance(body.get("model", ""), str):
        raise BadInput(f"model = {short(body['model'])}; it must be a string")


def _ids(body: Mapping[str, Any], key: str, vocabulary: int) -> list[int]:
    ids = body.get(key) or []
    if not isinstance(ids, list):
        raise BadInput(f"{key} must be a list of token ids, not {type(ids).__name__}")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise BadInput(f"{key} contains {short(token)}; token ids are integers from 0 to {vocabulary - 1}")
    return ids


def _integer(body: Mapping[str, Any], key: str, allowed: range, default: Any) -> Any:  # noqa: ANN401
    value = body.get(key)
    if value is None:
        return default
    if type(value) is not int or value not in allowed:
        raise BadInput(f"{key} = {short(value)}; it must be an integer from {allowed.start} to {allowed.stop - 1}")
    return value


def _number(body: Mapping[str, Any], key: str) -> float:
    value = body.get(key)
    if value is None:
        return 1.0
    if type(value) not in (int, float) or abs(value) > 1e300 or not math.isfinite(value):
        raise BadInput(f"{key} = {short(value)}; it must be a finite number")
    return float(value)


def _temperature(body: Mapping[str, Any]) -> float:
    temperature = _number(body, "temperature")
    if temperature != 0 and not 0.01 <= temperature <= 100:
        raise BadInput(f"temperature = {temperature!r}; it must be 0 (greedy) or from 0.01 to 100")
    return temperature
