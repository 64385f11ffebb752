"""What the embedded engine makes of a request's body, and its reply:
vLLM's OpenAI-compatible ones, with token ids, no text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from engine.instance.embedded.engine import Result
from engine.instance.embedded.sampling import Sampling
from engine.instance.protocol import Completion


def sampling_of(asked: Completion) -> Sampling:
    """How the response is sampled; a request without a seed gets a random one."""
    return Sampling(
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=int.from_bytes(os.urandom(7)) if asked.seed is None else asked.seed,
        stop_ids=asked.stop_ids,
        continued=asked.continued,
    )


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
    used = len(result.token_ids)
    prompt_tokens = len(prompt)
    return {
        "id": f"cmpl-{number}",
        "object": "text_completion",
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": used, "total_tokens": prompt_tokens + used},
        "weight_version": result.version,
        "weight_versions": [[0, result.version]] if used else [],
    }


def _prompt_logprobs(prompt: Sequence[int], values: Sequence[float]) -> list[dict[str, Any] | None]:
    """As vLLM gives them: nothing is known of the first token."""
    return [None, *({str(token): {"logprob": value}} for token, value in zip(prompt[1:], values, strict=True))]
