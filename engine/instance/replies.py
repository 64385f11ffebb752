"""The reply to a completion, the same from both engines: vLLM's OpenAI-compatible format with token ids and no text."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from numpy.typing import NDArray

from engine.types import JsonObject
from engine.wire.rollout_messages import write_columns

FinishReason = Literal["stop", "length", "abort", "error"]
"""Why a response ended. "error" means that the logits were not finite."""


@dataclass(frozen=True)
class Result:
    """The response to a request. `version` sampled all of its tokens."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    version: int
    prompt_logprobs: list[float] | None = None
    """Log-probabilities of the prompt's tokens except the first, at temperature 1. None if they were not requested or
    the request was not admitted."""
    routes: NDArray[Any] | None = None
    """[tokens of prompt and response except the last, layers with experts, experts per token]: the experts of each
    token (engine.wire.routes). None if they were not requested or nothing was computed."""

    @property
    def finite(self) -> bool:
        """Whether all log-probabilities are numbers, not NaN."""
        return not any(value != value for value in (*self.logprobs, *(self.prompt_logprobs or ())))

    @property
    def versions(self) -> list[list[int]]:
        """[index of its first token, version] for each stretch of tokens."""
        return [[0, self.version]] if self.token_ids else []


def completion_reply(number: int, model: str, prompt: Sequence[int], result: Result) -> JsonObject:
    """Return the reply to /v1/completions. Its `weight_version` is the version at the end of the response."""
    reply = _head(number=number, model=model, prompt=prompt, result=result)
    (choice,) = reply["choices"]
    choice["token_ids"] = result.token_ids
    choice["logprobs"] = {
        "token_logprobs": result.logprobs,
        "tokens": [f"token_id:{token}" for token in result.token_ids],
    }
    return reply


def completion_columns(number: int, model: str, prompt: Sequence[int], result: Result) -> bytes:
    """Return the same reply with its numbers as bytes (`write_columns`); the corresponding lists are
    empty."""
    head = _head(number=number, model=model, prompt=prompt, result=result)
    return write_columns(head, array("q", result.token_ids), array("d", result.logprobs))


def _head(number: int, model: str, prompt: Sequence[int], result: Result) -> JsonObject:
    """Return the reply without its numbers."""
    choice: JsonObject = {
        "index": 0,
        "text": "",
        "token_ids": [],
        "finish_reason": result.finish_reason,
        "logprobs": {"token_logprobs": [], "tokens": []},
    }
    if result.prompt_logprobs is not None:
        choice["prompt_logprobs"] = _prompt_logprobs(prompt, result.prompt_logprobs)
    if result.routes is not None:
        data = base64.b64encode(result.routes.tobytes()).decode()
        choice["routes"] = {"dtype": result.routes.dtype.name, "shape": list(result.routes.shape), "data": data}
    used = len(result.token_ids)
    prompt_tokens = len(prompt)
    return {
        "id": f"cmpl-{number}",
        "object": "text_completion",
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": used, "total_tokens": prompt_tokens + used},
        "weight_version": result.version,
        "weight_versions": result.versions,
    }


def _prompt_logprobs(prompt: Sequence[int], values: Sequence[float]) -> list[JsonObject | None]:
    """Return the prompt's log-probabilities in vLLM's format: None for the first token, which has none."""
    return [None, *({str(token): {"logprob": value}} for token, value in zip(prompt[1:], values, strict=True))]
