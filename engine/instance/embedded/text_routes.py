"""The embedded engine's text routes, in OpenAI's format: completions, chat completions, models; with streaming.

`parse_request` reads a request, and its errors name a key that the engine can't serve as requested. `Detokenizer`
decodes a response while it is sampled, up to its first stop string. `ReplyForm` writes the reply, whole or as stream
events.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as repr_short
from typing import Any

from engine.data.tokenizer import Tokenizer, render_chat
from engine.errors import BadInput, MetronomeError
from engine.instance import protocol
from engine.instance.asgi import Message, Receive, Send, error_body, send_json, send_start, unless_client_leaves
from engine.instance.embedded.backend import EmbeddedBackend
from engine.instance.http import CHAT, MODELS
from engine.instance.protocol import Completion, RequestLimits
from engine.instance.refusals import Conflict, Refusal, as_refusal
from engine.types import JsonObject

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""The text that the bytes of an incomplete character decode to."""


class Detokenizer:
    """Decodes the tokens of one response. Its outputs, concatenated, are the response's text."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        """`stop`: strings that end the text and are not part of it."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        self._begin = 0  # tokens from here on are decoded again, because a token's text depends on the previous one
        self._read = 0  # tokens before this one are in the text
        self._held = ""  # decoded, but may be the beginning of a stop string
        self.stopped = False
        """Whether a stop string was found. If so, the text is complete."""

    def add_token(self, token: int) -> str:
        """Return the text that is certain with this token; "" while a character or a stop string is incomplete."""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._begin : self._read])
        now = self._tokenizer.decode(self._ids[self._begin :])
        if len(now) <= len(before) or now.endswith(BROKEN):
            return ""
        self._begin = self._read
        self._read = len(self._ids)
        return self._up_to_stop(now[len(before) :])

    def finish_text(self) -> str:
        """Return the rest of the text. Call this after the last token."""
        before = self._tokenizer.decode(self._ids[self._begin : self._read])
        rest = self._tokenizer.decode(self._ids[self._begin :])[len(before) :]
        text = self._up_to_stop(rest)
        held = "" if self.stopped else self._held
        self._held = ""
        return text + held

    def _up_to_stop(self, more: str) -> str:
        """Return the part of the text that is certain with `more`, and hold back what may begin a stop string."""
        text = self._held + more
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if self.stopped or found:
            certain = "" if self.stopped else text[: min(found)]
            self.stopped = True
            self._held = ""
            return certain
        begun = [length for stop in self._stop for length in range(1, len(stop)) if text.endswith(stop[:length])]
        kept = max(begun, default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


MOST = 128
"""Most responses to one request: prompts times `n`."""
STOPS = 16
"""Most stop strings in a request."""
AS_OF_TOKENS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids", "ignore_eos")
"""Keys with the same meaning as in a request with token ids."""
SHARED = frozenset({"model", "n", "stop", "stream", "stream_options", "logprobs", *AS_OF_TOKENS})
KEYS = {
    False: SHARED | {"prompt", "add_special_tokens"},
    True: SHARED | {"messages", "max_completion_tokens", "chat_template_kwargs"},
}
"""Supported keys, by whether the request is a chat."""
IGNORED = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key"})
"""Keys without a meaning on a server without accounts."""
ONLY: Mapping[str, Sequence[object]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Keys of which this engine supports only the listed values, which request nothing. A key may also be null."""


@dataclass(frozen=True)
class TextRequest:
    """A checked request."""

    chat: bool
    completions: tuple[Completion, ...]
    """One per response, in the order of the reply's choices."""
    prompt_tokens: int
    """Tokens of all prompts. Each prompt counts once, however many responses it gets."""
    stop: tuple[str, ...]
    """Each of these strings ends a response, and is not part of it."""
    logprobs: bool
    """Whether the reply includes the log-probabilities of the sampled tokens."""
    stream: bool
    usage: bool
    """Whether the last event of a stream reports token counts."""


def parse_request(body: JsonObject, chat: bool, model: str, tokenizer: Tokenizer, limits: RequestLimits) -> TextRequest:
    """Return the checked body. Raise Refusal, which names the first key that can't be served as requested."""
    _check_keys(body, chat)
    if body.get("model") not in (None, "", model):
        raise Refusal(
            404,
            f"this instance does not serve the model {repr_short(body['model'])}; it serves {model!r}",
            param="model",
        )
    count = _count(body)
    prompts = [_chat_prompt(body, tokenizer)] if chat else _text_prompts(body, tokenizer)
    if len(prompts) * count > MOST:
        raise _wrong("n", f"{len(prompts)} prompts with {count} responses each; at most {MOST} responses are served")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or not options.keys() <= {"include_usage"}:
        raise _wrong("stream_options", f'{repr_short(options)}; it must be {{"include_usage": true}} or false')
    return TextRequest(
        chat=chat,
        completions=tuple(
            completion
            for prompt in prompts
            for completion in _responses(
                _completion(body=body, chat=chat, prompt=prompt, limits=limits, tokenizer=tokenizer), count
            )
        ),
        prompt_tokens=sum(map(len, prompts)),
        stop=_stop(body),
        logprobs=_logprobs(body, chat),
        stream=_flag(body, "stream"),
        usage=_flag(options, "include_usage"),
    )


def _wrong(key: str, message: str) -> Refusal:
    return Refusal(400, f"{key}: {message}", param=key)


def _check_keys(body: JsonObject, chat: bool) -> None:
    known = KEYS[chat]
    for key in sorted(body.keys() - known - IGNORED):
        if key not in ONLY:
            listed = ", ".join(sorted(known))
            raise _wrong(key, f"this key is not served here; known keys are {listed}")
        if body[key] is not None and not any(_same(body[key], one) for one in ONLY[key]):
            allowed = " or ".join(map(json.dumps, ONLY[key]))
            raise _wrong(key, f"{repr_short(body[key])}; the embedded engine serves only {allowed}")


def _same(given: object, wanted: object) -> bool:
    """Whether two values are the same in JSON, where 0 equals 0.0 but not false."""
    return given == wanted and isinstance(given, bool) == isinstance(wanted, bool)


def _flag(body: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _wrong(key, f"{repr_short(value)}; it must be true or false")
    return value


def _count(body: JsonObject) -> int:
    count = body.get("n")
    if count is None:
        return 1
    if type(count) is not int or not 1 <= count <= MOST:
        raise _wrong("n", f"{repr_short(count)}; it must be an integer from 1 to {MOST}")
    return count


def _stop(body: JsonObject) -> tuple[str, ...]:
    stop = body.get("stop")
    listed = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(listed, list) or len(listed) > STOPS or not all(isinstance(one, str) and one for one in listed):
        raise _wrong(
            "stop", f"{repr_short(stop)}; it must be a string or a list of at most {STOPS} strings, none empty"
        )
    return tuple(listed)


def _logprobs(body: JsonObject, chat: bool) -> bool:
    if chat:
        return _flag(body, "logprobs")
    given = body.get("logprobs")
    if given is not None and (type(given) is not int or given != 0):
        raise _wrong(
            "logprobs", f"{repr_short(given)}; the embedded engine only has those of the sampled tokens, which is 0"
        )
    return given is not None


def _text_prompts(body: JsonObject, tokenizer: Tokenizer) -> list[list[int]]:
    prompt = body["prompt"]
    texts = [prompt] if isinstance(prompt, str) else prompt
    if not all(isinstance(text, str) for text in texts):
        raise _wrong("prompt", "it must be a string, a list of strings, or a list of token ids")
    special = _flag(body, "add_special_tokens")
    return [list(tokenizer.hf.encode(text, add_special_tokens=special, verbose=False)) for text in texts]


def _chat_prompt(body: JsonObject, tokenizer: Tokenizer) -> list[int]:
    """Return the messages in the tokenizer's chat format, followed by the beginning of the answer."""
    if not tokenizer.hf.chat_template:
        raise _wrong(
            "messages",
            "the tokenizer of this model has no chat template; send a prompt to /v1/completions instead, "
            "or add a chat_template.jinja to the model's folder",
        )
    given = body.get("chat_template_kwargs") or {}
    taken = inspect.signature(tokenizer.hf.apply_chat_template).parameters
    if not isinstance(given, dict) or given.keys() & taken.keys():
        raise _wrong(
            "chat_template_kwargs", f"{repr_short(given)}; it must be an object with variables of the template"
        )
    messages = _messages(body)
    try:
        text = render_chat(tokenizer.hf, messages, given)
    except BadInput as error:
        raise _wrong("messages", str(error)) from None
    return list(tokenizer.hf.encode(text, add_special_tokens=False, verbose=False))


def _messages(body: JsonObject) -> list[dict[str, str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", 'it must be a list with at least one {"role": …, "content": …}')
    return [_message(place, message) for place, message in enumerate(messages)]


def _message(place: int, message: Any) -> dict[str, str]:  # noqa: ANN401
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _wrong("messages", f"message {place} is {repr_short(message)}; it must have a role and a content")
    content = message.get("content")
    if isinstance(content, list):  # a list of parts; this engine accepts only text parts
        content = "\n".join(_part(place, part) for part in content)
    if not isinstance(content, str):
        raise _wrong("messages", f"message {place}: its content is {repr_short(content)}; it must be a string")
    return {"role": message["role"], "content": content}


def _part(place: int, part: Any) -> str:  # noqa: ANN401
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise _wrong("messages", f"message {place} has the part {repr_short(part)}; only text is served")
    return text


def _completion(
    body: JsonObject, chat: bool, prompt: list[int], limits: RequestLimits, tokenizer: Tokenizer
) -> Completion:
    """Return what is requested for one response to a prompt. More tokens than the context has room for are refused, as
    by vLLM; only a chat that names no number may use whatever room there is."""
    asked: JsonObject = {key: body[key] for key in AS_OF_TOKENS if key in body}
    longest = "max_completion_tokens" if chat and body.get("max_completion_tokens") is not None else "max_tokens"
    if chat:
        asked["max_tokens"] = 2**31 - 1 if body.get(longest) is None else body[longest]
    try:
        one = protocol.parse_completion(asked | {"prompt": prompt}, limits)
    except BadInput as error:
        key, _, rest = str(error).partition(" ")
        key = {"max_tokens": longest, "prompt": "messages" if chat else "prompt"}.get(key, key)
        raise Refusal(400, f"{key} {rest}", param=key) from None
    wanted = body.get(longest) or (one.max_tokens if chat else protocol.DEFAULT_TOKENS)
    if wanted > one.max_tokens:
        raise _wrong(
            longest if body.get(longest) else "prompt",
            f"{longest} = {wanted} and a prompt of {len(prompt)} tokens do not fit into the maximum context length of "
            f"{limits.max_context} tokens, which leaves {one.max_tokens}",
        )
    end = tokenizer.hf.eos_token_id
    if end is not None and not body.get("ignore_eos"):
        one = dataclasses.replace(one, stop_ids=one.stop_ids | {end})
    return one


def _responses(one: Completion, count: int) -> list[Completion]:
    """Return the completion once per response to its prompt. If it has a seed, each gets a different one."""
    if one.seed is None:
        return [one] * count
    after = protocol.SEEDS.stop
    seeds = [(one.seed + number + after) % (2 * after) - after for number in range(count)]
    return [dataclasses.replace(one, seed=seed) for seed in seeds]


@dataclass(frozen=True)
class SampledToken:
    """A token of a response, with its data for the reply."""

    text: str
    logprob: float

    @property
    def entry(self) -> JsonObject:
        """The token's entry in a chat completion's log-probabilities."""
        return {
            "token": self.text,
            "logprob": self.logprob,
            "bytes": list(self.text.encode()),
            "top_logprobs": [],
        }


def list_models(name: str, max_context: int, since: int) -> JsonObject:
    """Return the reply to /v1/models. `since`: start time of the server, in seconds."""
    model = {"id": name, "object": "model", "created": since, "owned_by": "metronome", "max_model_len": max_context}
    return {"object": "list", "data": [model]}


class ReplyForm:
    """The format of the replies to one request."""

    def __init__(self, chat: bool, number: int, model: str) -> None:
        """`number`: number of the request, for its id."""
        self._chat = chat
        self._common: JsonObject = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[JsonObject], usage: JsonObject) -> JsonObject:
        """Return the reply with all choices."""
        kind = "chat.completion" if self._chat else "text_completion"
        return self._common | {"object": kind, "choices": list(choices), "usage": usage}

    def choice(self, index: int, text: str, tokens: Sequence[SampledToken] | None, reason: str) -> JsonObject:
        """Return a choice of a whole reply. `tokens`: None if log-probabilities were not requested."""
        said: JsonObject = {"text": text}
        if self._chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": index, **said, "finish_reason": reason, "logprobs": self._logprobs(tokens, 0)}

    def event(self, choices: Sequence[JsonObject], usage: JsonObject | None = None) -> JsonObject:
        """Return an event of a stream."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return self._common | {"object": kind, "choices": list(choices), "usage": usage}

    def opening(self, index: int) -> JsonObject | None:
        """Return the first piece of a choice; None if there is none."""
        if not self._chat:
            return None
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}

    def piece(
        self, index: int, text: str, tokens: Sequence[SampledToken] | None, offset: int, reason: str | None
    ) -> JsonObject:
        """Return a piece of a choice. `offset`: number of the choice's characters before it."""
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


def token_usage(prompts: int, sampled: int) -> JsonObject:
    """Return the token counts of a request's prompts and responses."""
    return {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}


EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class EmbeddedText:
    """TextRoutes of the embedded engine."""

    def __init__(self, backend: EmbeddedBackend, tokenizer: Tokenizer, name: str) -> None:
        """`name`: the model's name in requests and replies."""
        self.name = name
        self._backend = backend
        self._tokenizer = tokenizer
        self._since = int(time.time())
        self._numbers = itertools.count()

    async def __call__(self, scope: Message, body: JsonObject, receive: Receive, send: Send) -> None:
        """Answer a request for text, or for the list of models."""
        path = scope["path"]
        if path == MODELS[1]:
            await send_json(send, list_models(self.name, self._backend.limits.max_context, self._since))
            return
        asked = parse_request(
            body=body, chat=path == CHAT[1], model=self.name, tokenizer=self._tokenizer, limits=self._backend.limits
        )
        form = ReplyForm(asked.chat, next(self._numbers), self.name)
        writers = [
            _Writer(index, completion, Detokenizer(self._tokenizer, asked.stop), self._tokenizer)
            for index, completion in enumerate(asked.completions)
        ]
        answer = self._stream if asked.stream else self._whole
        await unless_client_leaves(answer(asked, form, writers, send), receive)

    async def _whole(self, asked: TextRequest, form: ReplyForm, writers: Sequence[_Writer], send: Send) -> None:
        await self._write(writers)
        choices = [
            form.choice(one.index, one.text, one.tokens if asked.logprobs else None, one.reason) for one in writers
        ]
        await send_json(send, form.whole(choices, _usage(asked, writers)))

    async def _write(self, writers: Sequence[_Writer]) -> None:
        """Sample all responses. The first error ends all of them."""
        tasks = [asyncio.create_task(one.write(self._backend)) for one in writers]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _stream(self, asked: TextRequest, form: ReplyForm, writers: Sequence[_Writer], send: Send) -> None:
        """Send each piece of text once it is available. An error before the first piece is raised, a later one becomes
        an event."""
        pieces: asyncio.Queue[JsonObject | None] = asyncio.Queue()
        for one in writers:
            one.on_piece = _pieces(form, one, asked.logprobs, pieces.put_nowait)
        writing = asyncio.create_task(self._write(writers))
        writing.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            piece = await pieces.get()
            if piece is None:
                await writing
            await send_start(send, 200, EVENTS)
            while piece is not None:
                await _send_event(send, form.event([piece]))
                piece = await pieces.get()
            try:
                await writing
            except MetronomeError as error:
                await _send_event(send, error_body(as_refusal(error)))
            else:
                if asked.usage:
                    await _send_event(send, form.event([], _usage(asked, writers)))
                await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            writing.cancel()


class _Writer:
    """One response while it is sampled: its tokens and its text."""

    def __init__(self, index: int, asked: Completion, detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
        self.index = index
        self.asked = asked
        self.text = ""
        self.tokens: list[SampledToken] = []
        self.reason = ""
        """Why the response ended; "" while it is sampled."""
        self.on_piece: Callable[[str], None] = lambda text: None
        """Called with each new piece of the text, with "" at the first token, and once more after `reason` is known."""
        self._detokenizer = detokenizer
        self._tokenizer = tokenizer
        self._cut: Callable[[], object] = lambda: None

    async def write(self, backend: EmbeddedBackend) -> None:
        """Sample the response. Raise Conflict if a pause interrupts it, Refusal if its log-probabilities are not
        finite."""
        sampling = asyncio.ensure_future(backend.complete(self.asked, self._add))
        self._cut = sampling.cancel
        try:
            result = await sampling
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._detokenizer.stopped or (task is not None and task.cancelling()):
                raise
            reason = "stop"
        else:
            if not result.finite:
                raise Refusal(500, f"the logits of weight version {result.version} are not finite")
            if result.finish_reason == "abort":
                raise Conflict("a pause of this instance cut the response short; send the request again")
            reason = result.finish_reason
        rest = self._detokenizer.finish_text()
        self.reason = "stop" if self._detokenizer.stopped else reason
        self.text += rest
        self.on_piece(rest)

    def _add(self, token: int, logprob: float) -> None:
        if self._detokenizer.stopped:
            return
        self.tokens.append(SampledToken(self._tokenizer.hf.decode([token]), logprob))
        if len(self.tokens) == 1:
            self.on_piece("")
        if token in self.asked.stop_ids:  # the token is part of the response, but not of its text
            return
        text = self._detokenizer.add_token(token)
        self.text += text
        if text:
            self.on_piece(text)
        if self._detokenizer.stopped:
            self._cut()


def _pieces(
    form: ReplyForm, writer: _Writer, logprobs: bool, put: Callable[[JsonObject], None]
) -> Callable[[str], None]:
    """Return a function that turns a writer's text into pieces of a stream."""
    told = 0  # tokens whose log-probabilities were sent

    def on_piece(text: str) -> None:
        nonlocal told
        if not text and not writer.reason:
            if opening := form.opening(writer.index):
                put(opening)
            return
        fresh = writer.tokens[told:]
        told = len(writer.tokens)
        put(
            form.piece(
                index=writer.index,
                text=text,
                tokens=fresh if logprobs else None,
                offset=len(writer.text) - len(text),
                reason=writer.reason or None,
            )
        )

    return on_piece


def _usage(asked: TextRequest, writers: Sequence[_Writer]) -> JsonObject:
    return token_usage(asked.prompt_tokens, sum(len(one.tokens) for one in writers))


async def _send_event(send: Send, content: JsonObject) -> None:
    event = f"data: {json.dumps(content)}\n\n".encode()
    await send({"type": "http.response.body", "body": event, "more_body": True})
