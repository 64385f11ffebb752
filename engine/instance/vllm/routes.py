"""What the routes of a vLLM instance do: the state of one server between HTTP (middleware.py) and vLLM's engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from engine.errors import BadInput, MetronomeError
from engine.instance import protocol
from engine.instance.vllm import request_bodies
from engine.instance.vllm.weight_version import WeightVersionReader

LOAD_S = 0.5
"""Seconds GET /load waits for the workers before it gives the version that they had last: a busy engine lives, too."""
DRAIN_S = 60.0
"""Seconds a pause waits for replies that vLLM has finished to be finished here."""

POLL_S = 0.0005
MAX_POLL_S = 0.02
"""How often a transfer under way is looked at: first, and when it takes long."""

Handler = Callable[[str, bytes], Awaitable[dict[str, Any]]]


class Refusal(MetronomeError):
    """An answer with this status and the error's message."""

    def __init__(self, status: int, kind: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.headers = headers


class VllmInstance:
    """One instance: vLLM's engine, whether it is paused, which completions are under way."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401
        """`engine`: vLLM's EngineClient."""
        self._engine = engine
        config = engine.vllm_config
        self.limits = protocol.RequestLimits(
            config.model_config.get_vocab_size(),
            config.model_config.max_model_len,
            request_bodies.stop_ids(Path(config.model_config.model)),
        )
        self._seats = config.scheduler_config.max_num_seqs
        self._version = WeightVersionReader(self._read_version)
        self._open = asyncio.Event()  # closed while paused
        self._open.set()
        self._idle = asyncio.Event()  # no completion between vLLM and its reply
        self._idle.set()
        self._held = self._running = self._generated = self._jobs = 0
        self._updating = False
        self._control = asyncio.Lock()
        self.handlers: dict[tuple[str, str], Handler] = {
            ("GET", "/weight_version"): self.weight_version,
            ("GET", "/load"): self.load,
            ("POST", "/pause"): self.pause,
            ("POST", "/resume"): self.resume,
            ("POST", "/reset_prefix_cache"): self.reset_prefix_cache,
            ("POST", "/init_weight_transfer_engine"): self.connect,
            ("POST", "/start_weight_update"): self.start,
            ("POST", "/update_weights"): self.update,
            ("POST", "/finish_weight_update"): self.finish,
        }

    # completions ----------------------------------------------------------------------------------

    def parse_completion(self, body: bytes) -> dict[str, Any]:
        """The body for vLLM. BadInput."""
        return request_bodies.completion(protocol.parse_completion(protocol.parse_object(body), self.limits))

    @contextlib.asynccontextmanager
    async def turn(self, gone: Callable[[], Awaitable[Any]]) -> AsyncIterator[int]:
        """Wait until the instance is not paused; gives the weight version before the prompt is sent.

        `gone` returns when the client is: then it does not wait any longer.
        """
        self._held += 1
        try:
            while not self._open.is_set():
                await self._open_before(gone)
        finally:
            self._held -= 1
        self._running += 1
        self._idle.clear()
        try:
            yield await self._version.before()
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _open_before(self, gone: Callable[[], Awaitable[Any]]) -> None:
        opened = asyncio.ensure_future(self._open.wait())
        left = asyncio.ensure_future(gone())
        try:
            await asyncio.wait({opened, left}, return_when=asyncio.FIRST_COMPLETED)
            if left.done():
                raise Refusal(499, "ClientClosedRequest", "the client left while the instance was paused")
        finally:
            opened.cancel()
            left.cancel()

    async def finish_completion(self, status: int, body: bytes, before: int) -> dict[str, Any]:
        """vLLM's reply with the versions of its tokens: one run, or two where the version changed meanwhile."""
        reply = _reply(status, body)
        if status != 200:
            return reply
        after = await self._version.after()
        choice = reply["choices"][0]
        tokens = choice["token_ids"] or []
        values = choice["logprobs"]["token_logprobs"] if tokens else []
        if any(value is None or value != value for value in values):
            raise Refusal(500, "InternalServer", f"the logits of weight version {after} are not finite")
        self._generated += len(tokens)
        runs = [[0, before]] if before == after else [[0, before], [max(0, len(tokens) - 1), after]]
        return {
            "id": reply["id"],
            "object": "text_completion",
            "model": reply["model"],
            "choices": [_choice(choice, tokens, values)],
            "usage": {key: reply["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")},
            "weight_version": after,
            "weight_versions": runs if tokens else [],
        }

    # state ----------------------------------------------------------------------------------------

    async def weight_version(self, query: str, body: bytes) -> dict[str, Any]:
        """Of the last finished update, from the workers."""
        return {"weight_version": await self._version.after()}

    async def load(self, query: str, body: bytes) -> dict[str, Any]:
        """What it does; the version is the last one known where the engine is too busy to say."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOAD_S):
                await self._version.after()
        running = min(self._running, self._seats)
        return {
            "running": running,
            "waiting": self._held + self._running - running,
            "generated_tokens": self._generated,
            "weight_version": self._version.known,
        }

    async def pause(self, query: str, body: bytes) -> dict[str, Any]:
        """Hold new completions back; answers when none is under way."""
        protocol.parse_object(body or b"{}")
        mode = parse_qs(query).get("mode", ["abort"])[-1]
        if mode not in ("abort", "wait"):
            raise BadInput(f"mode = {mode!r}; it must be abort or wait")
        self._open.clear()
        if mode == "wait":
            await self._idle.wait()  # outside the lock: a client that gives up waiting may pause with abort, or resume
        async with self._control:
            if self._open.is_set():
                raise Refusal(409, "Conflict", "somebody resumed the instance while this pause waited for it to drain")
            await self._engine.pause_generation(mode=mode)
            try:
                async with asyncio.timeout(DRAIN_S):
                    await self._idle.wait()
            except TimeoutError:
                raise Refusal(
                    500,
                    "Deadline",
                    f"{self._running} completions are still under way {DRAIN_S:g} s after vLLM paused (mode {mode})",
                ) from None
        return {"status": "paused"}

    async def resume(self, query: str, body: bytes) -> dict[str, Any]:
        """Let completions go on. Refused during a weight update, and after one that left a mixture of weights."""
        protocol.parse_object(body or b"{}")
        async with self._control:
            if self._updating:
                raise Refusal(409, "Conflict", "a weight update is under way; finish it before /resume")
            if any(state["damaged"] for state in await self._workers("state")):
                raise Refusal(
                    409, "Conflict", "an unfinished update left a mixture of weights; a whole update must come first"
                )
            await self._engine.resume_generation()
            self._open.set()
        return {"status": "resumed"}

    async def reset_prefix_cache(self, query: str, body: bytes) -> dict[str, Any]:
        """Forget computed prompts. vLLM can't while a request holds some of them, and says so:
        then it is an error here."""
        protocol.parse_object(body or b"{}")
        for pause_s in (0.0, 0.01, 0.1, 0.5):  # what a finished request held is free a moment later
            await asyncio.sleep(pause_s)
            if await self._engine.reset_prefix_cache() is not False:
                return {"message": "prefix cache reset"}
        raise Refusal(409, "Conflict", "running requests hold cached prompts; call /pause before /reset_prefix_cache")

    # weights --------------------------------------------------------------------------------------

    async def connect(self, query: str, body: bytes) -> dict[str, Any]:
        """Join the senders' groups."""
        info = protocol.parse_info(protocol.parse_object(body or b"{}"), "init_info")
        await self._job("connect", info)
        return {"message": "connected"}

    async def start(self, query: str, body: bytes) -> dict[str, Any]:
        """Begin an update; again is to begin anew."""
        protocol.optional_version(protocol.parse_object(body or b"{}"))
        async with self._control:
            if self._open.is_set():
                raise Refusal(409, "Conflict", "a weight update needs a paused instance: call /pause first")
            await self._workers("start")
            self._updating = True
        return {"message": "weight update started"}

    async def update(self, query: str, body: bytes) -> dict[str, Any]:
        """One bucket: into the model, or (staged) into host memory while generation goes on."""
        info = protocol.parse_info(protocol.parse_object(body or b"{}"), "update_info")
        if info.get("staged") is True:
            await self._workers("stage", info)
            return {"message": "receiving"}
        async with self._control:
            if not self._updating:
                raise Refusal(409, "Conflict", "no weight update is under way: call /start_weight_update first")
            await self._in_update(self._job("receive", info))
        return {"message": "weights loaded"}

    async def finish(self, query: str, body: bytes) -> dict[str, Any]:
        """End the update; from now on the workers hold this version."""
        version = protocol.parse_version(protocol.parse_object(body))
        async with self._control:
            if not self._updating:
                raise Refusal(409, "Conflict", "no weight update is under way: call /start_weight_update first")
            await self._in_update(self._workers("finish", version))
            self._updating = False
            await self._version.after()
        return {"weight_version": version}

    async def _in_update(self, step: Coroutine[Any, Any, Any]) -> None:
        """A refused step ends the update in the workers; with several of them also in those that did not refuse."""
        try:
            await step
        except Refusal:
            self._updating = False
            await self._workers("abort")
            raise

    async def _job(self, kind: str, info: dict[str, Any]) -> None:
        """WeightSession.begin, and its end; meanwhile the engine can be asked other things."""
        self._jobs += 1
        number = self._jobs
        pause_s = POLL_S
        await self._workers("begin", {"number": number, kind: info})
        while not all(await self._workers("poll", number)):
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, MAX_POLL_S)

    # workers --------------------------------------------------------------------------------------

    async def _workers(self, action: str, argument: Any = None) -> list[Any]:  # noqa: ANN401
        """The same action in every worker. Refusal with the first error."""
        answers = await self._engine.collective_rpc("metronome", args=(action, argument))
        for answer in answers:
            if "error" in answer:
                kind = {400: "BadRequest", 409: "Conflict", 500: "InternalServer"}.get(answer["status"])
                kind = kind or answer["kind"].removesuffix("Error")
                raise Refusal(answer["status"], kind, answer["error"])
        return [answer["result"] for answer in answers]

    async def _read_version(self) -> int:
        versions = {state["weight_version"] for state in await self._workers("state")}
        if len(versions) != 1:
            raise Refusal(
                500, "InternalServer", f"this instance's workers hold different weight versions: {sorted(versions)}"
            )
        return int(versions.pop())


def _choice(choice: dict[str, Any], tokens: list[int], values: list[float]) -> dict[str, Any]:
    """vLLM's choice without what the protocol does not have."""
    own = {
        "index": 0,
        "text": "",
        "token_ids": tokens,
        "finish_reason": choice["finish_reason"],
        "logprobs": {"token_logprobs": values, "tokens": [f"token_id:{token}" for token in tokens]},
    }
    return own if choice.get("prompt_logprobs") is None else own | {"prompt_logprobs": choice["prompt_logprobs"]}


def _reply(status: int, body: bytes) -> dict[str, Any]:
    """vLLM's reply; its errors in our form, those of a refused request never as 5xx."""
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    if isinstance(value, dict) and (status != 200 or value.get("choices")):
        return value
    raise Refusal(status if status >= 400 else 500, "Engine", f"vLLM answered {body[:300].decode(errors='replace')!r}")
