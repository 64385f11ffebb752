"""The embedded engine's text routes, in the format of OpenAI's: one text, by completions or chat completions."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Sequence
from reprlib import repr as repr_short

from engine.data.tokenizer import Tokenizer
from engine.errors import BadInput
from engine.instance import protocol
from engine.instance.embedded.backend import EmbeddedBackend
from engine.instance.http import CHAT, Message, Receive, Send, send_json, unless_client_leaves
from engine.instance.protocol import Completion, RequestLimits
from engine.instance.refusals import Conflict, Refusal
from engine.types import JsonObject

SAMPLING = ("max_tokens", "temperature", "top_p", "seed")
"""Keys with the same meaning as in a request with token ids."""
ROOM = 2**31 - 1
"""max_tokens of a chat that does not name it: the space left in the context."""


def parse_request(
    body: JsonObject, chat: bool, model: str, tokenizer: Tokenizer, limits: RequestLimits
) -> tuple[Completion, tuple[str, ...]]:
    """Return the checked body, and the strings that end the text. Raise BadInput, or Refusal (404) for another model;
    both name the key."""
    known = {"model", "stop", "messages" if chat else "prompt", *SAMPLING}
    if unknown := sorted(body.keys() - known):
        raise BadInput(
            f"{unknown[0]}: the embedded engine does not serve this key; it knows {', '.join(sorted(known))}"
        )
    if body.get("model") not in (None, "", model):
        raise Refusal(404, f"this instance does not serve the model {repr_short(body['model'])}; it serves {model!r}")
    stop = body.get("stop") or []
    listed = [stop] if isinstance(stop, str) else stop
    if not isinstance(listed, list) or not all(isinstance(one, str) and one for one in listed):
        raise BadInput(f"stop = {repr_short(stop)}; it must be a string or a list of strings, none empty")
    asked: JsonObject = {"max_tokens": ROOM} if chat else {}
    asked |= {key: body[key] for key in SAMPLING if body.get(key) is not None}
    text = _chat_text(body, tokenizer) if chat else body.get("prompt")
    if not isinstance(text, str):
        raise BadInput(f"prompt = {repr_short(text)}; it must be one text, or a list of token ids")
    prompt = tokenizer.encode(text)
    found = protocol.parse_completion(asked | {"prompt": prompt}, limits)
    ends = found.stop_ids.union(tokenizer.stop_ids, tokenizer.turn_ends if chat else ())
    return dataclasses.replace(found, stop_ids=ends), tuple(listed)


def _chat_text(body: JsonObject, tokenizer: Tokenizer) -> str:
    """Return the messages in the tokenizer's chat format, followed by the beginning of the answer."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadInput('messages: it must be a list with at least one {"role": …, "content": …}')
    for place, message in enumerate(messages):
        given = message if isinstance(message, dict) else {}
        if not isinstance(given.get("role"), str) or not isinstance(given.get("content"), str):
            raise BadInput(f"messages: message {place} is {repr_short(message)}; it must have a role and a text")
    try:
        return tokenizer.render([{key: one[key] for key in ("role", "content")} for one in messages], {})
    except BadInput as error:
        raise BadInput(f"messages: {error}") from None


class EmbeddedText:
    """TextRoutes of the embedded engine."""

    def __init__(self, backend: EmbeddedBackend, tokenizer: Tokenizer, name: str) -> None:
        """`name`: the model's name in requests and replies."""
        self.name = name
        self._backend = backend
        self._tokenizer = tokenizer
        self._numbers = itertools.count()

    async def __call__(self, scope: Message, body: JsonObject, receive: Receive, send: Send) -> None:
        """Answer a request for text."""
        chat = scope["path"] == CHAT[1]
        asked, stop = parse_request(
            body=body, chat=chat, model=self.name, tokenizer=self._tokenizer, limits=self._backend.limits
        )
        text, reason, sampled = await unless_client_leaves(self._sample(asked, stop), receive)
        said: JsonObject = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        reply = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{next(self._numbers)}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.name,
            "choices": [{"index": 0, **said, "finish_reason": reason, "logprobs": None}],
            "usage": {
                "prompt_tokens": len(asked.prompt),
                "completion_tokens": sampled,
                "total_tokens": len(asked.prompt) + sampled,
            },
        }
        await send_json(send, reply)

    async def _sample(self, asked: Completion, stop: Sequence[str]) -> tuple[str, str, int]:
        """Return the text up to the first stop string, why it ended, and the number of sampled tokens. Raise Conflict
        if a pause interrupts it, Refusal if its log-probabilities are not finite."""
        ids: list[int] = []

        def add(token: int, logprob: float) -> None:
            ids.append(token)
            text = self._tokenizer.decode(ids) if stop else ""
            if any(one in text for one in stop):
                sampling.cancel()

        sampling = asyncio.ensure_future(self._backend.complete(asked, add))
        try:
            await asyncio.wait([sampling])
        finally:
            sampling.cancel()
        reason = "stop"
        if not sampling.cancelled():
            result = sampling.result()
            if not result.finite:
                raise Refusal(500, f"the logits of weight version {result.version} are not finite")
            if result.finish_reason == "abort":
                raise Conflict("a pause of this instance cut the response short; send the request again")
            ids = result.token_ids
            reason = result.finish_reason
        ended = bool(ids) and ids[-1] in asked.stop_ids  # that token is part of the response, but not of its text
        text = self._tokenizer.decode(ids[: len(ids) - ended])
        cut = min((place for one in stop if (place := text.find(one)) >= 0), default=None)
        return (text, reason, len(ids)) if cut is None else (text[:cut], "stop", len(ids))
