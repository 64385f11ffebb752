"""The orchestrator's client for a rollout instance: one protocol for every engine, with token ids both ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import aiohttp
import msgspec

from engine.config import Evaluate, Rollout
from engine.errors import DeadlineError, MetronomeError
from engine.model.shape import Experts, end_of_sequence_ids, read_shape
from engine.orchestrator.pool.reply_check import Asked, BrokenRule, check_reply
from engine.types import Prompt
from engine.wire.access_token import authorization_headers
from engine.wire.columns import PackedResponse, open_ids
from engine.wire.rollout_messages import COLUMNS_TYPE, Complete, CompletionReply, InstanceRequest, read_answer
from engine.wire.routes import route_type

Reply = TypeVar("Reply")


class InstanceGone(MetronomeError):
    """The connection to the instance failed. Its requests go to another instance."""


class Abandoned(InstanceGone):
    """The pool ended the call, because it has excluded the instance. This is no further failure of the instance."""


class InstanceFault(MetronomeError):
    """The instance answered with a server error (5xx), or with something that is not a reply to the request."""


class BrokenReply(InstanceFault):
    """The instance answered 200, but the reply breaks the protocol. Nothing of it is used."""


class Refused(MetronomeError):
    """The instance refused the request (4xx). The request itself is wrong, so sending it again would not help."""


class Busy(Refused):
    """The instance can't take the request now (BUSY), or an update interrupted it. It can be sent again later."""


BUSY = (408, 409, 429)
"""408: it waited too long for the request's body. 409: it is paused or updating. 429: it holds too many requests."""


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are sampled."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    vocabulary: int
    """Number of token ids that the model knows."""
    stop_token_ids: tuple[int, ...] = ()
    model_stop_ids: frozenset[int] = frozenset()
    """The model's own end-of-sequence ids, which instances add to `stop_token_ids`."""
    partial: bool = False
    """Whether a response that a pause interrupted is kept and continued later (rollout.partial)."""
    mixed: bool = False
    """Whether turns of one response may come from several weight versions."""
    experts: Experts | None = None
    """The model's experts, if those of each token are requested (algorithm.routing_replay)."""
    seeded: bool = True
    """Whether each request has its own seed. Without a seed, a response comes from the instance's random stream."""

    def routes_bytes(self, prompt: int) -> int:
        """Return the largest size of a response's routes in a reply, in base64. `prompt`: number of prompt tokens."""
        if self.experts is None:
            return 0
        kind = route_type(self.experts.count)
        return 2 * (prompt + self.max_new_tokens) * kind.itemsize * len(self.experts.layers) * self.experts.per_token

    @classmethod
    def of(
        cls,
        settings: Rollout | Evaluate,
        model: Path,
        stop: tuple[int, ...],
        partial: bool = False,
        mixed: bool = False,
        routes: bool = False,
        seeded: bool = True,
    ) -> SamplingSettings:
        """Build the settings from a part of the config: `rollout` for training, `evaluate` for evaluations. `model`: a
        Hugging Face folder. `routes`: whether the experts of each token are requested. `seeded`: whether each request
        has a seed."""
        shape = read_shape(model)
        return cls(
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            vocabulary=shape.vocabulary,
            stop_token_ids=stop,
            model_stop_ids=end_of_sequence_ids(model),
            partial=partial,
            mixed=mixed,
            experts=shape.experts if routes else None,
            seeded=seeded,
        )


class InstanceClient:
    """HTTP calls to one rollout instance. Every call has a deadline, and `end_calls` ends the calls in progress.

    Between `hold_responses` and `release_responses` the instance may sample, but its responses are held back: no
    response sampled by new weights is released before these were compared with the trainer's. `end_calls` discards
    the responses that are held back. Only `Instance` calls `hold_responses`, `release_responses` and `end_calls`.
    """

    def __init__(
        self, name: str, url: str, session: aiohttp.ClientSession, timeout_s: float, token: str | None = None
    ) -> None:
        """`token`: the access token that the instance requires."""
        self.name = name
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self.send_token(token)
        self.url = url
        self._session = session
        self._timeout_s = timeout_s
        self._under_way: set[asyncio.Timeout] = set()
        self._ended: dict[asyncio.Timeout, str] = {}
        self._trusted = asyncio.Event()
        self._trusted.set()

    def send_token(self, token: str | None) -> None:
        """Send this access token from now on: an instance that was started again at its address may have another."""
        self._headers |= authorization_headers(token)

    async def call(self, request: InstanceRequest[Reply], timeout_s: float | None = None, more_bytes: int = 0) -> Reply:
        """Send a request and wait for its reply. `timeout_s` defaults to rollout.timeout_s. The reply may have
        `more_bytes` than the request says.

        Raises InstanceGone (connection broken), Abandoned (`end_calls`), InstanceFault (5xx), BrokenReply,
        DeadlineError, Busy (409 …) and Refused (other 4xx); each names instance and route.
        """
        what = f"{request.method} {request.path}"
        data = msgspec.json.encode(request) if request.method == "POST" else None
        try:
            async with self._limited(what, self._timeout_s if timeout_s is None else timeout_s):
                status, form, raw = await self._answer(request, data, more_bytes)
        except aiohttp.ClientResponseError as error:
            raise InstanceFault(f"{self.name}: {what}: no HTTP answer: {error.message}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise InstanceGone(f"{self.name}: {what}: {type(error).__name__} {error}") from None
        except ValueError as wrong:
            raise BrokenReply(f"{self.name}: {what} was answered, but the reply is not read: {wrong}") from None
        return cast(Reply, _reply(call=f"{self.name}: {what}", status=status, form=form, raw=raw, kind=request.reply))

    async def _answer(
        self, request: InstanceRequest[Reply], data: bytes | None, more_bytes: int
    ) -> tuple[int, str, bytes]:
        """Return the reply's status, content type and body. Raises ValueError for a body that is too large."""
        headers = {"Accept": request.accept, **self._headers}
        async with self._session.request(
            request.method, self.url + request.path, data=data, headers=headers, allow_redirects=False
        ) as answer:
            raw = await read_answer(answer, request.largest_reply + more_bytes)
            return answer.status, answer.content_type, raw

    @asynccontextmanager
    async def _limited(self, what: str, limit_s: float | None) -> AsyncIterator[None]:
        """Run the body until `limit_s` has passed (None: no limit) or `end_calls` ends it. A reply that arrives at
        that moment is discarded."""
        scope = asyncio.timeout(limit_s)
        try:
            async with scope:
                self._under_way.add(scope)
                yield
        except TimeoutError:
            if scope not in self._ended:
                raise DeadlineError(f"{self.name}: no answer to {what} in {limit_s:g} s") from None
        finally:
            self._under_way.discard(scope)
            reason = self._ended.pop(scope, None)
        if reason is not None:
            raise Abandoned(f"{self.name}: {what} was abandoned: {reason}")

    def until_ended(self, what: str) -> AbstractAsyncContextManager[None]:
        """Run work on the instance that has its own deadlines. `end_calls` ends it with Abandoned."""
        return self._limited(what, None)

    def hold_responses(self) -> None:
        """Hold back the instance's responses: its new weights have not been compared with the trainer's yet."""
        self._trusted.clear()

    def release_responses(self) -> None:
        """Release the instance's responses, since it computes with the trainer's weights."""
        self._trusted.set()

    async def _until_released(self) -> None:
        """Wait until responses may be released. Raises Abandoned and DeadlineError."""
        if not self._trusted.is_set():
            what = "POST /v1/completions, whose weights were to be compared with the trainer's"
            async with self._limited(what, self._timeout_s):
                await self._trusted.wait()

    def end_calls(self, reason: str) -> None:
        """End every call in progress with Abandoned, so that the callers continue without this instance."""
        now = asyncio.get_running_loop().time()
        for scope in self._under_way - self._ended.keys():
            if not scope.expired():  # else its own deadline has just ended it
                self._ended[scope] = reason
                scope.reschedule(now)

    async def complete(
        self, prompt: Prompt, sampling: SamplingSettings, seed: int | None, so_far: PackedResponse | None = None
    ) -> PackedResponse:
        """Sample one response, or continue `so_far`.

        Returns once the weights that sampled the response are trusted. Raises what `call` raises. With
        `sampling.partial`, a response that a pause interrupted has finish_reason "abort".
        """
        begun = open_ids(so_far.token_ids) if so_far is not None else ()
        reply = await self.call(
            Complete(
                prompt=[*prompt.token_ids, *begun],
                max_tokens=sampling.max_new_tokens - len(begun),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=msgspec.UNSET if seed is None else seed,
                stop_token_ids=list(sampling.stop_token_ids),
                continued=len(begun) or msgspec.UNSET,
                routes=True if sampling.experts else msgspec.UNSET,
            ),
            more_bytes=sampling.routes_bytes(len(prompt.token_ids)),
        )
        response = self._checked(reply, sampling, len(prompt.token_ids), len(begun), seed=seed)
        await self._until_released()
        if response.finish_reason == "abort" and not (sampling.partial and response.length):
            raise Busy(f"{self.name}: a pause cut the response short after {response.length} tokens")
        return join_responses(so_far, response)

    def _checked(
        self, reply: CompletionReply, sampling: SamplingSettings, prompt: int, begun: int, seed: int | None
    ) -> PackedResponse:
        """Return the reply's response, which continues `prompt` + `begun` tokens. Raises BrokenReply if the reply does
        not answer the request."""
        stops = frozenset(sampling.stop_token_ids)
        asked = Asked(
            max_tokens=sampling.max_new_tokens - begun,
            vocabulary=sampling.vocabulary,
            stops=stops,
            ends=stops | sampling.model_stop_ids,
            experts=sampling.experts,
            prompt=prompt + begun,
        )
        try:
            return check_reply(reply, asked, seed, self.name)
        except BrokenRule as wrong:
            raise BrokenReply(f"{self.name}: its reply to POST /v1/completions breaks the protocol: {wrong}") from None


def join_responses(so_far: PackedResponse | None, more: PackedResponse) -> PackedResponse:
    """Join a response and its continuation. Tokens, log-probabilities, weight versions and routes stay those they were
    sampled with. The continuation's routes begin with those of the prompt, as computed again."""
    if so_far is None:
        return more
    begun = so_far.length
    later = tuple((begun + start, version) for start, version in more.versions)
    if later and so_far.versions and later[0][1] == so_far.versions[-1][1]:
        later = later[1:]  # the same weights as before the cut
    return msgspec.structs.replace(
        more,
        token_ids=so_far.token_ids + more.token_ids,
        logprobs=so_far.logprobs + more.logprobs,
        versions=so_far.versions + later,
        loss_mask=so_far.loss_mask + more.loss_mask,
        routes=so_far.routes + more.routes[len(so_far.routes) :],
    )


def _reply(call: str, status: int, form: str, raw: bytes, kind: type[msgspec.Struct]) -> msgspec.Struct:
    """Decode the reply as `kind`, by its media type (`form`). An empty body counts as an empty object."""
    if status != 200:
        error = Busy if status in BUSY else Refused if 400 <= status < 500 else InstanceFault
        raise error(f"{call} answered {status}: {raw[:500].decode(errors='replace')}")
    try:
        if form == COLUMNS_TYPE and kind is CompletionReply:
            return CompletionReply.of_columns(raw)
        return msgspec.json.decode(raw if raw.strip() else b"{}", type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        begins = raw[:200].decode(errors="replace")
        raise BrokenReply(f"{call} answered 200 with an invalid reply: {error}; it begins {begins!r}") from None
