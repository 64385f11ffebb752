"""What vLLM is asked for a completion that was checked, and what is made of its output."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from engine.instance.protocol import Completion
from engine.instance.replies import Result

LEAST = -9999.0
"""vLLM's for a log-probability of minus infinity, which JSON does not have."""


def arguments(asked: Completion) -> dict[str, Any]:
    """Those of vLLM's SamplingParams."""
    found: dict[str, Any] = {
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "stop_token_ids": sorted(asked.stop_ids),
        "ignore_eos": True,  # the ids above stop; vLLM has no tokenizer that knows another
        "detokenize": False,
        "logprobs": 0,
    }
    if asked.seed is not None:
        found["seed"] = _seed(asked.seed, asked.continued)
    if asked.prompt_logprobs:
        found["prompt_logprobs"] = 0
    return found


def _seed(seed: int, continued: int) -> int:
    """vLLM begins a stream with every request: one that goes on must not draw the numbers of its beginning again."""
    if not continued:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {continued}".encode()).digest()[:8], "big") >> 1


def result(output: Any, version: int, earlier: int | None) -> Result:  # noqa: ANN401
    """Of vLLM's RequestOutput. The prompt's log-probabilities are not there where it was aborted before."""
    sampled = output.outputs[0]
    tokens = list(sampled.token_ids)
    scores = output.prompt_logprobs
    return Result(
        token_ids=tokens,
        logprobs=_logprobs(sampled.logprobs or [], tokens),
        finish_reason=sampled.finish_reason,
        version=version,
        prompt_logprobs=_logprobs(scores[1:], output.prompt_token_ids[1:]) if scores else None,
        earlier=earlier,
    )


def _logprobs(entries: Any, tokens: list[int]) -> list[float]:  # noqa: ANN401
    """Each token's own, of vLLM's {token: Logprob, …} for each position; NaN stays NaN."""
    return [max(entry[token].logprob, LEAST) for entry, token in zip(entries, tokens, strict=True)]


def stop_ids(model: Path) -> frozenset[int]:
    """End-of-sequence ids of a Hugging Face folder: of generation_config.json and config.json."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (model / name).is_file():
            ids = json.loads((model / name).read_text()).get("eos_token_id")
            found |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)
