"""The HTTP routes of a rollout instance, shared by both engines: an ASGI application over a backend, and the metrics
that both engines report.

Token and limits are checked before a body is parsed. docs/protocol.md describes the routes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from reprlib import repr as repr_short
from typing import Any, Protocol, TypeVar

from engine.errors import BadInput, MetronomeError
from engine.instance import protocol
from engine.instance.protocol import Completion, RequestLimits
from engine.instance.refusals import Conflict, Refusal, as_refusal
from engine.instance.replies import Result, completion_columns, completion_reply
from engine.types import JsonObject
from engine.wire.access_token import VARIABLE, is_authorized, own_token, refuse_source
from engine.wire.rollout_messages import COLUMNS_TYPE, ROLLOUT_PROTOCOL

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

METRICS = {
    "running": ("gauge", "metronome_instance_running", "Responses being decoded."),
    "waiting": ("gauge", "metronome_instance_waiting", "Requests that wait for a slot."),
    "weight_version": ("gauge", "metronome_instance_weight_version", "Weight version served; 0 is the base model."),
    "generated_tokens": ("counter", "metronome_instance_generated_tokens_total", "Tokens sampled since the start."),
    "prefills": (
        "counter",
        "metronome_instance_prefills_total",
        "Prompts computed from their first token since the start.",
    ),
    "updates": ("counter", "metronome_instance_weight_updates_total", "Weight updates finished since the start."),
}
"""Type, name and text of each figure of `Backend.load`, and of `updates`."""


def metrics_text(figures: Mapping[str, int]) -> bytes:
    """Return the figures in Prometheus's text format."""
    found = [
        f"# HELP {name} {text}\n# TYPE {name} {kind}\n{name} {figures[key]}\n"
        for key, (kind, name, text) in METRICS.items()
    ]
    return "".join(found).encode()


class Backend(Protocol):
    """An engine behind the routes (docs/protocol.md). The routes check completions before they call it.

    A method that raises BadInput or Conflict has changed nothing, except that a weight update may have ended.
    `complete` is cancelled when its client disconnects; every other call runs to its end.
    """

    model: str
    """The folder that the model was loaded from."""
    limits: RequestLimits
    world_size: int
    """Processes that take part in a weight transfer."""

    async def complete(self, asked: Completion) -> Result:
        """Sample one response. Wait while the instance is paused. Raise Conflict after a weight update that failed
        half-way."""

    async def check_health(self) -> None:
        """Raise an error if the engine is dead."""

    async def load(self) -> dict[str, int]:
        """Return the numbers of `running` and `waiting` responses, of `prefills` (prompts computed from their first
        token) and of `generated_tokens` since the start, and the `weight_version`."""

    async def metrics(self) -> bytes:
        """Return the engine's own metrics in Prometheus's text format."""

    async def pause(self, abort: bool) -> None:
        """Stop admitting requests, and return once nothing runs. With `abort` every request, including waiting ones,
        ends with the tokens it has; otherwise the running ones finish."""

    async def resume(self) -> None:
        """Admit requests again. Raise Conflict while responses drain, and while the weights are incomplete."""

    async def reset_prefix_cache(self) -> None:
        """Drop the cached prompts."""

    async def start_profile(self) -> None:
        """Start recording a profile in the folder of --profile. Raise BadInput if the instance was started without that
        option. Called only while none is being recorded."""

    async def stop_profile(self) -> None:
        """Write the profile that is being recorded."""

    async def connect(self, init_info: JsonObject) -> None:
        """Join the senders' groups (Receiver.connect). Cancel a transfer or a connect in progress."""

    async def start_update(self) -> None:
        """Begin a weight update, or restart it. Raise Conflict unless paused and drained."""

    async def update(self, update_info: JsonObject) -> None:
        """Receive and load a bucket, or begin to stage it."""

    async def finish_update(self, version: int) -> int:
        """Give the new weights their version, and return the version that the processes with the weights say. Raise
        Conflict if the weights are incomplete."""

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """Return the log-probabilities of the tokens except the first, at temperature 1. Called while paused."""


# ASGI ---------------------------------------------------------------------------------------------


class ClientLeft(Exception):
    """The client has closed its connection, so there is nowhere to send the reply."""


async def unless_client_leaves(work: Awaitable[T], receive: Receive) -> T:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise ClientLeft."""
    task = asyncio.current_task()
    assert task is not None
    watch = asyncio.ensure_future(_wait_until_client_leaves(receive))
    watch.add_done_callback(lambda ended: None if ended.cancelled() else task.cancel())
    try:
        return await work
    except asyncio.CancelledError:
        if not watch.done():
            raise
        task.uncancel()
        raise ClientLeft from None
    finally:
        watch.cancel()


async def _wait_until_client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, content: JsonObject) -> None:
    """Send a reply with status 200."""
    await send_body(send, 200, json.dumps(content).encode())


async def send_error(send: Send, error: Refusal) -> None:
    """Send a refusal, in the form of OpenAI's errors."""
    body = {"error": {"message": str(error), "type": error.kind, "param": None, "code": error.status}}
    await send_body(send=send, status=error.status, body=json.dumps(body).encode(), more=error.headers)


async def send_body(
    send: Send, status: int, body: bytes, content_type: str = "application/json", more: Mapping[str, str] | None = None
) -> None:
    """Send a complete reply."""
    headers = {"Content-Type": content_type, "Content-Length": str(len(body)), **(more or {})}
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


# the routes ---------------------------------------------------------------------------------------

WEIGHTS_BYTES = 16 * 2**20
"""Largest body of a route with weights. It carries names, dtypes and shapes of a bucket's tensors, less than 200
bytes each, never the tensors."""
OTHER_BYTES = 2**16
"""Largest body of any other route, not counting a completion's token ids."""
TOKEN_BYTES = 16
"""Bytes allowed for one token id in a JSON list, with its comma and spaces."""
COMPLETION = ("POST", "/v1/completions")
CHAT = ("POST", "/v1/chat/completions")
HEALTH = ("GET", "/health")
TOKENS_ONLY = "this instance takes token ids only; `metronome serve --model FOLDER` starts one that takes text"


class TextRoutes(Protocol):
    """Text routes, for clients of OpenAI's API (docs/serving.md)."""

    name: str
    """The model's name in requests and replies."""

    async def __call__(self, scope: Message, body: JsonObject, receive: Receive, send: Send) -> None:
        """Answer a request for CHAT, or for COMPLETION with a text prompt. Its body has been read and parsed.

        An error raised before the reply has begun becomes the reply.
        """


@dataclass(frozen=True)
class _Request:
    """A request that has passed the checks of token, route and size."""

    scope: Message
    body: JsonObject
    receive: Receive
    send: Send


@dataclass(frozen=True)
class _Content:
    """A reply body that is not JSON."""

    body: bytes
    kind: str
    """Media type of the body."""


Handler = Callable[[_Request], Awaitable[JsonObject | _Content | None]]
"""Returns the reply's body, or None if it has already replied."""


def _query(request: _Request) -> str:
    return str(request.scope["query_string"].decode("ascii", "replace"))


class InstanceApp:
    """The routes of one instance."""

    def __init__(
        self,
        backend: Backend,
        open_requests: int,
        read_s: float,
        text: TextRoutes | None = None,
        policy_version: int = 0,
    ) -> None:
        """`open_requests`: most completions that may wait or run at a time. `read_s`: seconds a client may take to send
        a body. Without `text` the instance takes token ids only. `policy_version`: what `GET /` says before the first
        weight update."""
        self._backend = backend
        self._text = text
        self._policy_version = policy_version
        self._token = own_token()
        self._open_requests = open_requests
        self._read_s = read_s
        self._open = 0
        self._updates = 0
        self._profiling = False
        self._begun = 0
        """Number of weight updates that were asked to begin."""
        self._numbers = itertools.count()
        # most token ids in a request: the longest prompt, plus every token as a stop token
        ids = backend.limits.max_context + backend.limits.vocabulary
        longest = OTHER_BYTES + TOKEN_BYTES * ids
        self._routes: dict[tuple[str, str], tuple[Handler, int]] = {
            ("GET", "/"): (self._about, OTHER_BYTES),
            COMPLETION: (self._complete, longest),
            HEALTH: (self._health, OTHER_BYTES),
            ("GET", "/load"): (self._load, OTHER_BYTES),
            ("GET", "/metrics"): (self._metrics, OTHER_BYTES),
            ("POST", "/pause"): (self._pause, OTHER_BYTES),
            ("POST", "/resume"): (self._resume, OTHER_BYTES),
            ("POST", "/reset_prefix_cache"): (self._reset_prefix_cache, OTHER_BYTES),
            ("POST", "/start_profile"): (self._start_profile, OTHER_BYTES),
            ("POST", "/stop_profile"): (self._stop_profile, OTHER_BYTES),
            ("POST", "/init_weight_transfer_engine"): (self._connect, WEIGHTS_BYTES),
            ("POST", "/begin_weight_update"): (self._begin_update, OTHER_BYTES),
            ("POST", "/update_weights"): (self._update, WEIGHTS_BYTES),
            ("POST", "/finish_weight_update"): (self._finish_update, OTHER_BYTES),
        }
        if text is not None:
            self._routes[CHAT] = (self._answer_text, longest)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Reply to one request. A WebSocket is closed."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        begun = False
        # an idle connection of a stranger would take the place of the orchestrator's
        close = [] if self.is_trusted(scope["headers"]) else [(b"connection", b"close")]

        async def reply(message: Message) -> None:
            nonlocal begun
            begun = True
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *close]}
            await send(message)

        try:
            content = await self._answer(scope, receive, reply)
        except ClientLeft:
            return
        except MetronomeError as error:
            if not begun:
                await send_error(reply, as_refusal(error))
        except Exception as error:  # a bug in this server: log the traceback
            logging.getLogger(__name__).exception("%s %s", scope["method"], scope["path"])
            if not begun:
                await send_error(reply, Refusal(500, f"{type(error).__name__}: {error}"))
        else:
            if isinstance(content, _Content):
                await send_body(reply, 200, content.body, content.kind)
            elif content is not None:
                await send_json(reply, content)

    def is_trusted(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a request with these headers (lower-case names) carries the token, once."""
        given = [value for name, value in headers if name == b"authorization"]
        return len(given) == 1 and is_authorized(given[0], self._token)

    # checks before the routes ---------------------------------------------------------------------

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> JsonObject | _Content | None:
        """Return the handler's result. The token is checked before any of the request's body is kept."""
        route = (scope["method"], scope["path"])
        if wrong := refuse_source(
            {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        ):
            raise Refusal(*wrong)
        self._demand_token(scope, route)
        if route not in self._routes:
            raise self._route_refusal(route)
        handler, limit = self._routes[route]
        counts = route in (COMPLETION, CHAT)
        if counts and self._open >= self._open_requests:  # the client may retry later, or elsewhere
            raise Refusal(429, f"{self._open} completions are already waiting or running here, which is the limit")
        self._open += counts
        try:
            body = await self._read_body(scope, receive, limit)
            return await handler(_Request(scope, protocol.parse_object(body or b"{}"), receive, send))
        finally:
            self._open -= counts

    def _demand_token(self, scope: Message, route: tuple[str, str]) -> None:
        """Raise Refusal (401) unless the request carries the token. GET /health needs none."""
        if route != HEALTH and not self.is_trusted(scope["headers"]):
            raise Refusal(
                status=401,
                message=f"missing or wrong token; send `Authorization: Bearer TOKEN`, with {VARIABLE} of this server",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _route_refusal(self, route: tuple[str, str]) -> Refusal:
        if methods := ", ".join(method for method, path in self._routes if path == route[1]):
            return Refusal(
                status=405, message=f"{route[1]} takes {methods}, not {route[0]}", headers={"Allow": methods}
            )
        return Refusal(404, f"there is no route {route[1]}")

    async def _read_body(self, scope: Message, receive: Receive, limit: int) -> bytearray:
        """Return the request's body. Raise Refusal: 413 if it exceeds the limit, 408 if it takes too long."""
        too_large = Refusal(413, f"{scope['path']} takes bodies of at most {limit} bytes")
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._read_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    if not message.get("more_body"):
                        return body
        except TimeoutError:
            raise Refusal(408, f"the request's body did not arrive within {self._read_s:g} s") from None

    # the routes -----------------------------------------------------------------------------------

    async def _about(self, request: _Request) -> JsonObject:
        """Describe this server to a person who opens it in a browser."""
        version = (await self._backend.load())["weight_version"] or self._policy_version
        return {
            "what": "a rollout instance of Metronome: it samples responses of a language model",
            "model": self._backend.model,
            "weight_version": version,
            "context": self._backend.limits.max_context,
            "protocol": ROLLOUT_PROTOCOL,
            "text": f"not here: {TOKENS_ONLY}"
            if self._text is None
            else f"OpenAI's API under /v1; the model is {self._text.name!r}",
            "routes": [f"{method} {path}" for method, path in self._routes],
        }

    async def _answer_text(self, request: _Request) -> None:
        assert self._text is not None
        await self._text(request.scope, request.body, request.receive, request.send)

    async def _complete(self, request: _Request) -> JsonObject | _Content | None:
        """Sample one response to one prompt of token ids. A text prompt goes to the text routes."""
        if protocol.has_text(request.body):
            if self._text is None:
                raise Refusal(400, f"prompt is text: {TOKENS_ONLY}")
            await self._answer_text(request)
            return None
        asked = protocol.parse_completion(request.body, self._backend.limits)
        result = await unless_client_leaves(self._backend.complete(asked), request.receive)
        if not result.finite:
            raise Refusal(500, f"the logits of weight version {result.version} are not finite")
        number = next(self._numbers)
        model = self._backend.model
        accept = b",".join(value for name, value in request.scope["headers"] if name == b"accept").decode("latin-1")
        if COLUMNS_TYPE in accept:
            return _Content(completion_columns(number, model, asked.prompt, result), COLUMNS_TYPE)
        return completion_reply(number, model, asked.prompt, result)

    async def _health(self, request: _Request) -> JsonObject:
        """Return the protocol's version and the size of a weight transfer if the engine is alive."""
        await self._backend.check_health()
        return {"protocol": ROLLOUT_PROTOCOL, "world_size": self._backend.world_size}

    async def _load(self, request: _Request) -> JsonObject:
        return await self._backend.load()

    async def _metrics(self, request: _Request) -> _Content:
        own = metrics_text(await self._backend.load() | {"updates": self._updates})
        return _Content(own + await self._backend.metrics(), CONTENT_TYPE)

    async def _pause(self, request: _Request) -> JsonObject:
        await self._backend.pause(protocol.parse_abort(_query(request)))
        return {"status": "paused"}

    async def _resume(self, request: _Request) -> JsonObject:
        await self._backend.resume()
        return {"status": "resumed"}

    async def _reset_prefix_cache(self, request: _Request) -> JsonObject:
        await self._backend.reset_prefix_cache()
        return {"message": "prefix cache reset"}

    async def _start_profile(self, request: _Request) -> JsonObject:
        if self._profiling:
            raise Conflict("a profile is being recorded already; send /stop_profile first")
        self._profiling = True
        began = False
        try:
            await self._backend.start_profile()
            began = True
        finally:
            self._profiling = began
        return {"message": "the profile has begun"}

    async def _stop_profile(self, request: _Request) -> JsonObject:
        if not self._profiling:
            raise Conflict("no profile is being recorded; send /start_profile first")
        self._profiling = False
        await self._backend.stop_profile()
        return {"message": "the profile is written"}

    async def _connect(self, request: _Request) -> JsonObject:
        """Join the groups of an init_info. Without one, do nothing: files need no groups."""
        if info := protocol.parse_info(request.body, "init_info"):
            await self._backend.connect(info)
        return {"message": "ready for weights"}

    async def _begin_update(self, request: _Request) -> JsonObject:
        """Pause, and begin a weight update once nothing runs, unless a newer one was asked to begin meanwhile."""
        abort = protocol.parse_abort(_query(request))
        self._begun += 1
        number = self._begun
        await self._backend.pause(abort)
        if number != self._begun:
            raise Conflict("a newer weight update has begun")
        await self._backend.start_update()
        return {"message": "weight update started"}

    async def _update(self, request: _Request) -> JsonObject:
        info = protocol.parse_info(request.body, "update_info")
        if not isinstance(info.get("staged", False), bool):
            raise BadInput(f"update_info.staged = {repr_short(info['staged'])}; it must be true or false")
        await self._backend.update(info)
        return {"message": "weights loaded"}

    async def _finish_update(self, request: _Request) -> JsonObject:
        """Name the new weights, compute the probe with them, and serve them."""
        version, probe = protocol.parse_finish(request.body, self._backend.limits)
        held = await self._backend.finish_update(version)
        await self._backend.reset_prefix_cache()
        logprobs = await self._backend.score(probe) if probe else []
        if any(value != value for value in logprobs):
            raise Refusal(500, f"the logits of weight version {held} are not finite")
        await self._backend.resume()
        self._updates += 1
        return {"weight_version": held, "logprobs": logprobs}
