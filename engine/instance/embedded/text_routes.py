"""The embedded engine's routes with text, as OpenAI has them: completions, chat completions, models; also streams."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Sequence

from engine.data.tokenizer import Tokenizer
from engine.errors import MetronomeError
from engine.instance.asgi import Message, Receive, Send, error_body, send_json, start, unless_client_leaves
from engine.instance.embedded.backend import EmbeddedBackend
from engine.instance.embedded.detokenizer import Detokenizer
from engine.instance.embedded.text_replies import ReplyForm, SampledToken, models, usage
from engine.instance.embedded.text_requests import TextRequest, parse
from engine.instance.http import CHAT, MODELS
from engine.instance.protocol import Completion
from engine.instance.refusals import Conflict, Refusal, as_refusal
from engine.types import JsonObject

EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class EmbeddedText:
    """TextRoutes of the embedded engine."""

    def __init__(self, backend: EmbeddedBackend, tokenizer: Tokenizer, name: str) -> None:
        """`name`: of the model, in requests and replies."""
        self.name = name
        self._backend = backend
        self._tokenizer = tokenizer
        self._since = int(time.time())
        self._numbers = itertools.count()

    async def __call__(self, scope: Message, body: JsonObject, receive: Receive, send: Send) -> None:
        """Answer a request for a text, or for the list of models."""
        path = scope["path"]
        if path == MODELS[1]:
            await send_json(send, models(self.name, self._backend.limits.max_context, self._since))
            return
        asked = parse(
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
        """Sample all responses. The first error ends them all."""
        tasks = [asyncio.create_task(one.write(self._backend)) for one in writers]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _stream(self, asked: TextRequest, form: ReplyForm, writers: Sequence[_Writer], send: Send) -> None:
        """Send each piece of text as it comes. An error before the first piece is raised, a later one is an event."""
        pieces: asyncio.Queue[JsonObject | None] = asyncio.Queue()
        for one in writers:
            one.on_piece = _pieces(form, one, asked.logprobs, pieces.put_nowait)
        writing = asyncio.create_task(self._write(writers))
        writing.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            piece = await pieces.get()
            if piece is None:
                await writing
            await start(send, 200, EVENTS)
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
        """Why it ended; "" while it is sampled."""
        self.on_piece: Callable[[str], None] = lambda text: None
        """Called with each further piece of the text, with "" at the first token, and after `reason` is known."""
        self._detokenizer = detokenizer
        self._tokenizer = tokenizer
        self._cut: Callable[[], object] = lambda: None

    async def write(self, backend: EmbeddedBackend) -> None:
        """Sample it. Raise Conflict if a pause breaks it off, Refusal if its log-probabilities are not finite."""
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
                raise Conflict("a pause of this instance broke the response off; send the request again")
            reason = result.finish_reason
        rest = self._detokenizer.end()
        self.reason = "stop" if self._detokenizer.stopped else reason
        self.text += rest
        self.on_piece(rest)

    def _add(self, token: int, logprob: float) -> None:
        if self._detokenizer.stopped:
            return
        self.tokens.append(SampledToken(self._tokenizer.hf.decode([token]), logprob))
        if len(self.tokens) == 1:
            self.on_piece("")
        if token in self.asked.stop_ids:  # it is part of the response, but not of its text
            return
        text = self._detokenizer.add(token)
        self.text += text
        if text:
            self.on_piece(text)
        if self._detokenizer.stopped:
            self._cut()


def _pieces(
    form: ReplyForm, writer: _Writer, logprobs: bool, put: Callable[[JsonObject], None]
) -> Callable[[str], None]:
    """Return a function that makes pieces of a stream of a writer's text."""
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
    return usage(asked.prompt_tokens, sum(len(one.tokens) for one in writers))


async def _send_event(send: Send, content: JsonObject) -> None:
    event = f"data: {json.dumps(content)}\n\n".encode()
    await send({"type": "http.response.body", "body": event, "more_body": True})
