"""OpenAI's chat completions over one conversation of a rollout program: an agent's request is a turn, whose tokens stay
as they were sampled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Protocol

import msgspec
from aiohttp import web

from engine.errors import BadInput, OutOfRoom
from engine.wire.access_token import is_authorized, refuse_source
from engine.wire.connections import HeaderLimit

MAX_BODY = 16 * 2**20
"""Largest body of a request in bytes."""
MOST_SILENT = 16
"""Largest number of a conversation's connections without a request. All conversations share a process's files."""
ONLY: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("auto",),
    "logit_bias": ({},),
}
"""Keys that would change what is sampled or answered, and their values that do not."""
NOT_READ = frozenset(
    " ".join(
        (
            "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty",
            "user metadata store service_tier safety_identifier prompt_cache_key",
        )
    ).split()
)
"""Keys with any value: what is sampled is up to the recipe, and the others are for OpenAI's accounts."""


class StreamOptions(msgspec.Struct):
    """What a stream has besides its turn."""

    include_usage: bool | None = None


class OpenAIRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The keys of a request that are read."""

    messages: list[Any]
    model: str | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""A tool call as models of the Hermes format write it."""


class Conversation(Protocol):
    """What of `engine.verifier.program.Chat` is used here, which describes it."""

    length: int

    def check_limits(self, stop: str | Sequence[str], max_new_tokens: int) -> object:  # noqa: D102
        ...

    def begin(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> None:  # noqa: ANN401, D102
        ...

    def messages(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> None:  # noqa: ANN401, D102
        ...

    async def complete(self, *, stop: str | Sequence[str], max_new_tokens: int) -> Any:  # noqa: ANN401, D102
        ...


@contextlib.asynccontextmanager
async def serve_conversation(chat: Conversation) -> AsyncIterator[tuple[str, str]]:
    """Listen on a loopback port of its own while the block runs. Yields base URL and API key.

    Raises OutOfRoom in place of the error with which an agent ends because no token or turn was left.
    """
    server = _ConversationServer(chat)
    app = web.Application(middlewares=[server.guard], client_max_size=MAX_BODY)
    app.router.add_post("/v1/chat/completions", server.complete)
    runner = await server.limit.run(app, auto_decompress=False)
    try:
        site = web.SockSite(runner, socket.create_server(("127.0.0.1", 0)))
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", server.key
    except Exception as error:
        if server.out_of_room is not None:  # whatever the agent has made of the refusal
            raise server.out_of_room from error
        raise
    finally:
        await runner.cleanup()
        server.close()


class _ConversationServer:
    """Takes one request at a time. Each repeats the whole conversation, which must continue what was said. The last
    request again, as clients send it that have given it up, gets the same turn."""

    def __init__(self, chat: Conversation) -> None:
        self.key = secrets.token_hex(32)
        self.limit = HeaderLimit(most=MOST_SILENT)
        self.out_of_room: OutOfRoom | None = None
        self._chat = chat
        self._said: list[dict[str, Any]] = []
        self._turns = 0
        self._asked: Any = None
        """The last request's body."""
        self._reply: asyncio.Task[dict[str, Any]] | None = None
        """The reply to it, which is sampled also where the client does not wait for it."""

    def close(self) -> None:
        """Sample no more."""
        if self._reply is not None:
            self._reply.cancel()

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:  # noqa: ANN401
        """Refuse strangers before the body is read."""
        self.limit.stop(request.transport)
        refused = refuse_source(request.headers)
        given = request.headers.getall("Authorization", [])
        if refused is None and not (len(given) == 1 and is_authorized(given[0], self.key)):
            refused = 401, "missing or wrong API key; this conversation has one of its own"
        if refused is None:
            return await handler(request)  # type: ignore[no-any-return]
        reply = _failed(*refused)
        reply.force_close()
        return reply

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Sample the turn that the request asks for."""
        try:
            body = await request.json()
        except (OSError, web.RequestPayloadError, ValueError, LookupError, RecursionError) as error:
            # if the client has gone, nobody reads this
            return _failed(400, str(error))
        try:
            asked = read_request(body)
            reply = await self._reply_to(body, asked)
        except OutOfRoom as error:
            self.out_of_room = error
            return _failed(400, str(error), "context_length_exceeded")
        except (BadInput, ValueError, TypeError, RuntimeError) as error:  # of tokenizer, template and `Chat`
            return _failed(400, str(error))
        if not asked.stream:
            return web.json_response(reply)
        return await _stream(request, reply, bool(asked.stream_options and asked.stream_options.include_usage))

    async def _reply_to(self, body: Any, request: OpenAIRequest) -> dict[str, Any]:  # noqa: ANN401
        before = self._asked, self._reply
        if self._reply is None or body != self._asked:
            if self._reply is not None and not self._reply.done():
                raise BadInput("the turn before is still being sampled; a conversation has one turn at a time")
            self._asked = body
            self._reply = asyncio.create_task(self._answer(request))
        asked = self._reply
        try:
            return await asyncio.shield(asked)
        except Exception:
            if self._reply is asked:  # a request that was refused is none that can be sent again
                self._asked, self._reply = before
            raise

    async def _answer(self, request: OpenAIRequest) -> dict[str, Any]:
        tools = request.tools or None
        stop = request.stop or ()
        limit = request.max_completion_tokens or request.max_tokens or 0
        self._chat.check_limits(stop, limit)  # a request that is refused must not have continued the conversation
        self._continue(
            [_plain(place, message) for place, message in enumerate(request.messages)],
            {**(request.chat_template_kwargs or {}), **({"tools": tools} if tools else {})},
        )
        turn = await self._chat.complete(stop=stop, max_new_tokens=limit)
        text = turn.text
        for end in (stop,) if isinstance(stop, str) else stop:
            text = text.removesuffix(end)
        message = {"role": "assistant", **(self._split_calls(text) if tools else {"content": text})}
        self._said.append(_plain(len(self._said), message))
        self._turns += 1
        return self._completion(request.model or "", turn, message)

    def _continue(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> None:
        """Append the messages that are new. Raises BadInput if those before are not what was said."""
        known = len(self._said)
        for place, (ours, theirs) in enumerate(zip(self._said, [*messages, *[None] * known], strict=False)):
            if theirs is None or _compared(ours) != _compared(theirs):
                raise BadInput(
                    f"messages: message {place} is {theirs!r:.200}, but the conversation so far has {ours!r:.200} "
                    "there; each request must repeat the conversation and add to its end"
                )
        new = messages[known:]
        if not new and (not known or self._said[-1]["role"] == "assistant"):
            raise BadInput("messages: there is no message after the last answer")
        if not known:
            self._chat.begin(new, **variables)
        elif new:
            self._chat.messages(new, **variables)
        self._said += new

    def _split_calls(self, text: str) -> dict[str, Any]:
        """Content and tool calls of an answer. What is no valid call stays in the content."""
        calls: list[dict[str, Any]] = []

        def take(found: re.Match[str]) -> str:
            try:
                called = json.loads(found[1])
                name = called["name"]
                arguments = called.get("arguments", {})
            except (ValueError, KeyError, RecursionError):
                return found[0]
            if not isinstance(name, str):
                return found[0]
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments)
            identity = f"call_{self._turns}_{len(calls)}"  # a program's input must not depend on chance
            calls.append({"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}})
            return ""

        content = CALL.sub(take, text)
        return {"content": content.strip() or None, "tool_calls": calls} if calls else {"content": text}

    def _completion(self, model: str, turn: Any, message: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401
        reason = "tool_calls" if message.get("tool_calls") else turn.finish_reason
        count = len(turn.token_ids)
        return {
            "id": f"chatcmpl-{self._turns}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
            "usage": {
                "prompt_tokens": self._chat.length - count,
                "completion_tokens": count,
                "total_tokens": self._chat.length,
            },
        }


def read_request(body: Any) -> OpenAIRequest:  # noqa: ANN401
    """Check all of a request but its messages. A key that is null counts as absent. Raises BadInput, which names a key
    that is wrong or unknown."""
    if not isinstance(body, dict):
        raise BadInput(f"the body is {body!r:.80}; expected a JSON object")
    given = {key: value for key, value in body.items() if value is not None and key not in NOT_READ}
    try:
        request = msgspec.convert({key: given[key] for key in given.keys() - ONLY.keys()}, OpenAIRequest)
    except msgspec.ValidationError as error:
        told, _, key = str(error).partition(" - at `$.")
        raise BadInput(f"{key.rstrip('`')}: {told}" if key else told) from None
    for key in ONLY.keys() & given.keys():
        value = given[key]
        if not any(type(value) is type(one) and value == one for one in ONLY[key]):  # True is 1
            raise BadInput(f"{key}: {value!r:.80}; only {json.dumps(ONLY[key][0])} is served here")
    return request


def _plain(place: int, message: Any) -> dict[str, Any]:  # noqa: ANN401
    """The message with what a chat template reads. Raises BadInput for another content than text."""
    content = message.get("content") if isinstance(message, dict) else None
    whole = {"type": "text", "text": "" if content is None else content}
    parts = content if isinstance(content, list) else [whole]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    known = isinstance(message, dict) and isinstance(message.get("role"), str)
    if not known or not all(isinstance(text, str) for text in texts):
        raise BadInput(f"messages: message {place} is {message!r:.200}; expected a role and a text as its content")
    more = {key: message[key] for key in ("tool_calls", "tool_call_id", "name") if message.get(key)}
    return {"role": message["role"], "content": "\n".join(map(str, texts)), **more}


def _compared(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """What must be the same when a message is repeated: all but white space around its content."""
    return {**message, "content": message["content"].strip()}


async def _stream(request: web.Request, reply: Mapping[str, Any], usage: bool) -> web.StreamResponse:
    """Send the reply as the events of a stream."""
    choice = reply["choices"][0]
    calls = [{"index": place, **call} for place, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    parts: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    if usage:
        parts.append({"choices": [], "usage": reply["usage"]})
    head = {key: reply[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    with contextlib.suppress(ConnectionError):  # the client has gone
        await response.prepare(request)
        for part in parts:
            await response.write(b"data: " + json.dumps(head | part).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
    return response


def _failed(status: int, message: str, code: str | None = None) -> web.Response:
    """Return an error in OpenAI's form. Status 400 is not sent again by its clients."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)
