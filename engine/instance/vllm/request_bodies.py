"""What vLLM gets of a request that was checked: what is malformed never reaches it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from engine.instance.protocol import Completion


def completion(asked: Completion) -> dict[str, Any]:
    """The body of vLLM's /v1/completions."""
    body: dict[str, Any] = {
        "prompt": list(asked.prompt),
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "stop_token_ids": sorted(asked.stop_ids),
        "ignore_eos": True,  # the ids above stop; vLLM has no tokenizer that knows another
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if asked.seed is not None:
        body["seed"] = _seed(asked.seed, asked.continued)
    if asked.prompt_logprobs:
        body["prompt_logprobs"] = 0
    return body


def _seed(seed: int, continued: int) -> int:
    """vLLM begins a stream with every request: one that goes on must not draw the numbers of its beginning again."""
    if not continued:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {continued}".encode()).digest()[:8], "big") >> 1


def stop_ids(model: Path) -> frozenset[int]:
    """End-of-sequence ids of a Hugging Face folder: of generation_config.json and config.json."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (model / name).is_file():
            ids = json.loads((model / name).read_text()).get("eos_token_id")
            found |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)
