"""The engine under test: calls to its routes, as the orchestrator makes them and as a foreign client would."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import aiohttp
import msgspec

from engine.errors import DeadlineError, MetronomeError
from engine.tools.conformance.reference import Reference
from engine.types import JsonObject
from engine.wire.access_token import authorization_headers
from engine.wire.rollout_messages import (
    BaseWeights,
    BeginUpdate,
    CompletionReply,
    FinishUpdate,
    GetLoad,
    InstanceRequest,
    Load,
    Update,
    read_answer,
)

Reply = TypeVar("Reply")
LARGEST_REPLY = 2**26
"""Largest reply in bytes that is read."""
LONG = 10**6
"""A number of tokens larger than any context."""
LOOK_S = 0.01
"""Seconds between two checks of the load."""


class RefusedCall(MetronomeError):
    """The engine refused a call that it should have carried out."""


@dataclass(frozen=True)
class EngineAnswer:
    """A raw reply."""

    status: int
    raw: bytes

    @property
    def json(self) -> Any:  # noqa: ANN401
        """Its JSON; None if it is not JSON."""
        try:
            return json.loads(self.raw)
        except ValueError:
            return None

    @property
    def error(self) -> str:
        """The message of an error in the protocol's form; "" if it has another form."""
        found = self.json
        error = found.get("error") if isinstance(found, dict) else None
        if not isinstance(error, dict) or error.get("code") != self.status or not isinstance(error.get("type"), str):
            return ""
        return error["message"] if isinstance(error.get("message"), str) else ""

    def __str__(self) -> str:
        return f"{self.status} {self.raw[:200].decode(errors='replace')}"


class EngineCalls:
    """Calls to one engine. All have the deadline `timeout_s`, which their errors name."""

    def __init__(self, url: str, session: aiohttp.ClientSession, token: str | None, timeout_s: float) -> None:
        self.url = url
        self.token = token
        self.timeout_s = timeout_s
        self._session = session

    async def ask(
        self, method: str, path: str, body: JsonObject | bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> EngineAnswer:
        """Send any request. `headers` replace the default header with the token. Raise RefusedCall if the connection
        breaks."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        sent = authorization_headers(self.token) if headers is None else headers
        try:
            async with asyncio.timeout(self.timeout_s):
                async with self._session.request(
                    method, self.url + path, data=data, headers=dict(sent), allow_redirects=False
                ) as reply:
                    return EngineAnswer(reply.status, await read_answer(reply, LARGEST_REPLY))
        except TimeoutError:
            raise DeadlineError(f"no answer to {method} {path} in {self.timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise RefusedCall(f"{method} {path}: {type(error).__name__} {error}") from None


class TriedEngine(EngineCalls):
    """The engine under test, with the model that it serves, and the calls that an orchestrator makes."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, token: str | None, timeout_s: float, reference: Reference
    ) -> None:
        super().__init__(url, session, token, timeout_s)
        self.reference = reference
        self.changed = False
        """Whether its weights may differ from those with which it was started."""

    async def call(self, request: InstanceRequest[Reply]) -> Reply:
        """Send a request of the orchestrator, and read the reply as the orchestrator does. Raise RefusedCall for any
        other reply."""
        data = msgspec.json.encode(request) if request.method == "POST" else None
        answer = await self.ask(request.method, request.path, data)
        return cast(Reply, _read(f"{request.method} {request.path}", answer, request.reply))

    async def complete(self, **body: Any) -> CompletionReply:  # noqa: ANN401
        """Sample one response: by default 8 tokens after the reference's prompt, ignoring the end of sequence."""
        answer = await self.ask("POST", "/v1/completions", self.body(**body))
        reply = cast(CompletionReply, _read("POST /v1/completions", answer, CompletionReply))
        for choice in reply.choices:
            choice.token_ids = tuple(choice.token_ids)  # hashable, because the rules count different responses
        return reply

    def body(self, **body: Any) -> JsonObject:  # noqa: ANN401
        """The body of a completion. A key with the value None is left out."""
        common = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "n": 1, "logprobs": 0, "return_token_ids": True}
        whole = {"prompt": self.reference.prompt, "max_tokens": 8, "ignore_eos": True, "seed": 0, **common, **body}
        return {key: value for key, value in whole.items() if value is not None}

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """The log-probabilities of a prompt's tokens except the first. Raise RefusedCall if the reply lacks them."""
        reply = await self.complete(prompt=token_ids, max_tokens=1, prompt_logprobs=0)
        entries = (reply.choices[0].prompt_logprobs or [])[1:]
        found = [(entry or {}).get(str(token)) for entry, token in zip(entries, token_ids[1:], strict=False)]
        values = [one.logprob for one in found if one is not None]
        if len(values) != len(token_ids) - 1:
            raise RefusedCall(f"prompt_logprobs has {len(values)} of the prompt's {len(token_ids) - 1} tokens")
        return values

    # state ----------------------------------------------------------------------------------------

    async def load(self) -> Load:
        """Its load."""
        return await self.call(GetLoad())

    async def version(self) -> int:
        """The weight version that it reports."""
        return (await self.load()).weight_version

    async def until(self, holds: Callable[[Load], bool], what: str) -> Load:
        """Wait until `holds` is true of its load. Raise DeadlineError."""
        deadline = time.monotonic() + self.timeout_s
        while not holds(load := await self.load()):
            if time.monotonic() > deadline:
                raise DeadlineError(f"waited {self.timeout_s:g} s for {what}; GET /load says {load}")
            await asyncio.sleep(LOOK_S)
        return load

    @contextlib.asynccontextmanager
    async def under_way(self, count: int, max_tokens: int = LONG) -> AsyncIterator[list[asyncio.Task[CompletionReply]]]:
        """Run responses during the body, at least one of which is being sampled. Those left at the end are dropped."""
        tasks = [asyncio.create_task(self.complete(max_tokens=max_tokens, seed=seed)) for seed in range(count)]
        try:
            await self.until(
                lambda load: load.running > 0 or all(task.done() for task in tasks), "a response to be sampled"
            )
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # weights --------------------------------------------------------------------------------------

    async def update(self, infos: Iterable[JsonObject], version: int) -> None:
        """Make a whole weight update, in the orchestrator's order."""
        await self.begin_update()
        await self.load_buckets(infos)
        await self.finish_update(version)

    async def begin_update(self) -> None:
        """Pause, and begin an update."""
        self.changed = True
        await self.call(BeginUpdate("abort"))

    async def load_buckets(self, infos: Iterable[JsonObject]) -> None:
        """Send the buckets of an update."""
        for info in infos:
            answer = await self.ask("POST", "/update_weights", {"update_info": info})
            if answer.status != 200:
                raise RefusedCall(f"POST /update_weights answered {answer}, expected 200")

    async def finish_update(self, version: int, probe: Sequence[int] = ()) -> list[float]:
        """Set the version, and serve it. Return the log-probabilities of the probe. Raise RefusedCall if the reply
        names another version."""
        updated = await self.call(FinishUpdate(version, probe))
        if updated.weight_version != version:
            raise RefusedCall(f"/finish_weight_update to version {version} answered {updated.weight_version}")
        return updated.logprobs

    async def base(self, perturb: list[int], version: int) -> None:
        """Load the weights with which it was started, with the output rows of these tokens changed."""
        await self.begin_update()
        await self.call(Update(BaseWeights(perturb)))
        await self.finish_update(version)

    async def restore(self) -> None:
        """Restore the weights with which it was started, as version 0, with nothing paused."""
        if self.changed:
            await self.base([], 0)
            self.changed = False
        else:
            await self.ask("POST", "/resume", {})


def _read(what: str, answer: EngineAnswer, kind: type[msgspec.Struct]) -> msgspec.Struct:
    if answer.status != 200:
        raise RefusedCall(f"{what} answered {answer}")
    try:
        return msgspec.json.decode(answer.raw if answer.raw.strip() else b"{}", type=kind)
    except msgspec.DecodeError as error:
        begins = answer.raw[:100].decode(errors="replace")
        raise RefusedCall(f"{what} answered 200 with an invalid reply: {error}; it begins {begins!r}") from None
