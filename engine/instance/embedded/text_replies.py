"""Replies with text in the forms of OpenAI's API: completions and chat completions, whole and as events of a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine.types import JsonObject


@dataclass(frozen=True)
class SampledToken:
    """A token of a response, with what the reply says of it."""

    text: str
    logprob: float

    @property
    def entry(self) -> JsonObject:
        """Its log-probability in a chat completion."""
        return {
            "token": self.text,
            "logprob": self.logprob,
            "bytes": list(self.text.encode()),
            "top_logprobs": [],
        }


def models(name: str, max_context: int, since: int) -> JsonObject:
    """The reply to /v1/models. `since`: the time of the server's start, in seconds."""
    model = {"id": name, "object": "model", "created": since, "owned_by": "metronome", "max_model_len": max_context}
    return {"object": "list", "data": [model]}


class ReplyForm:
    """The form of the replies to one request."""

    def __init__(self, chat: bool, number: int, model: str) -> None:
        """`number`: of the request, for its id."""
        self._chat = chat
        self._common: JsonObject = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[JsonObject], usage: JsonObject) -> JsonObject:
        """The reply with all choices."""
        kind = "chat.completion" if self._chat else "text_completion"
        return self._common | {"object": kind, "choices": list(choices), "usage": usage}

    def choice(self, index: int, text: str, tokens: Sequence[SampledToken] | None, reason: str) -> JsonObject:
        """A choice of a whole reply. `tokens`: None where no log-probabilities were asked for."""
        said: JsonObject = {"text": text}
        if self._chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": index, **said, "finish_reason": reason, "logprobs": self._logprobs(tokens, 0)}

    def event(self, choices: Sequence[JsonObject], usage: JsonObject | None = None) -> JsonObject:
        """An event of a stream."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return self._common | {"object": kind, "choices": list(choices), "usage": usage}

    def opening(self, index: int) -> JsonObject | None:
        """The first piece of a choice; None where there is none."""
        if not self._chat:
            return None
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}

    def piece(
        self, index: int, text: str, tokens: Sequence[SampledToken] | None, offset: int, reason: str | None
    ) -> JsonObject:
        """A piece of a choice. `offset`: characters of the choice before it."""
        said: JsonObject = {"text": text}
        if self._chat:
            said = {"delta": {"content": text} if text or reason is None else {}}
        return {"index": index, **said, "finish_reason": reason, "logprobs": self._logprobs(tokens, offset)}

    def _logprobs(self, tokens: Sequence[SampledToken] | None, offset: int) -> JsonObject | None:
        if tokens is None:
            return None
        if self._chat:
            return {"content": [token.entry for token in tokens], "refusal": None}
        places = []
        for token in tokens:
            places.append(offset)
            offset += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": None,
            "text_offset": places,
        }


def usage(prompts: int, sampled: int) -> JsonObject:
    """The numbers of tokens of a request's prompts and responses."""
    return {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}
