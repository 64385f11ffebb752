"""The embedded engine behind the HTTP routes, and its weight updates: other threads receive the bytes, the engine's
thread copies them into the model."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any, TypeVar

from torch.profiler import ProfilerActivity

from engine.errors import BadInput, DeadlineError, MetronomeError
from engine.instance.embedded.engine import Engine, SamplingRequest
from engine.instance.embedded.weight_load import Named
from engine.instance.protocol import Completion, RequestLimits, Sampling
from engine.instance.receiver import Receiver
from engine.instance.refusals import NO_PROFILES
from engine.instance.replies import Result
from engine.platform.base import torch_profiler
from engine.types import JsonObject
from engine.wire.weights.backends import BACKENDS

T = TypeVar("T")

STOP_S = 30.0
"""Seconds that the thread may take to finish its current step."""


class EngineThread:
    """Runs the engine's steps in a thread. Calls arrive through a queue and run between steps."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]) -> None:
        """`on_end` is called in `loop` when the thread ends, by `stop` or by an error."""
        self._engine = engine
        self._loop = loop
        self._on_end = on_end
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread. From then on no other thread may use the engine."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step. Running requests get no reply. Raise DeadlineError after STOP_S."""
        self._calls.put(None)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            raise DeadlineError(f"the engine's thread did not finish its step within {STOP_S:g} s")

    async def complete(
        self,
        prompt: tuple[int, ...],
        sampling: Sampling,
        score_prompt: bool = False,
        on_token: Callable[[int, float], None] | None = None,
    ) -> Result:
        """Sample one response. If the awaiting task is cancelled, the request is dropped.

        `on_token` is called in the event loop with each token and its log-probability, as soon as it is sampled.
        """
        done: Future[Result] = Future()
        request = SamplingRequest(prompt, sampling, lambda result: _settle(done, lambda: result), score_prompt)
        if on_token is not None:
            request.on_token = lambda token, logprob: self._loop.call_soon_threadsafe(on_token, token, logprob)
        self._calls.put(lambda: self._submit(request, done))
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            self._calls.put(lambda: self._engine.cancel(request))
            raise

    def _submit(self, request: SamplingRequest, done: Future[Result]) -> None:
        try:
            self._engine.submit(request)
        except MetronomeError as error:
            with contextlib.suppress(InvalidStateError):
                done.set_exception(error)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Call a function with the engine between two steps. Return its result, or raise its MetronomeError."""
        done: Future[T] = Future()
        self._calls.put(lambda: _settle(done, lambda: function(self._engine)))
        return await asyncio.wrap_future(done)

    async def pause(self, abort: bool) -> None:
        """Call Engine.pause and wait until nothing runs."""
        done: Future[None] = Future()
        self._calls.put(lambda: self._engine.pause(abort, lambda: _settle(done, lambda: None)))
        await asyncio.wrap_future(done)

    def _run(self) -> None:
        try:
            while self._carry_out_calls():
                if self._engine.busy:
                    self._engine.step()
        finally:
            self._loop.call_soon_threadsafe(self._on_end)

    def _carry_out_calls(self) -> bool:
        """Run the queued calls; wait for one if there is nothing to decode. Return False after `stop`."""
        wait = not self._engine.busy  # no deadline: being idle is not an error
        while wait or not self._calls.empty():
            wait = False
            call = self._calls.get()
            if call is None:
                return False
            call()
        return True


def _settle(done: Future[T], act: Callable[[], T]) -> None:
    """Call `act`, and give its result or its MetronomeError to whoever waits, unless that one has left."""
    with contextlib.suppress(InvalidStateError):
        try:
            done.set_result(act())
        except MetronomeError as error:
            done.set_exception(error)


class EmbeddedBackend:
    """A Backend that calls the engine in the engine's thread.

    The steps of a weight update run one at a time. The routes never cancel a running step, because it must end.
    """

    world_size = 1

    def __init__(self, worker: EngineThread, limits: RequestLimits, model: str, profile: Path | None = None) -> None:
        """`model`: folder that the model was loaded from; `profile`: file that a profile is written to, without the
        suffix .json.gz; None: profiling is off."""
        self.limits = limits
        self.model = model
        self._worker = worker
        self._profile = profile
        self._recording: Any = None
        self._receiver = Receiver()
        self._step = asyncio.Lock()
        self._loading: asyncio.Task[None] | None = None

    async def complete(self, asked: Completion, on_token: Callable[[int, float], None] | None = None) -> Result:
        """Sample one response. `on_token` is called with each token and its log-probability. Raise Conflict after a
        weight update that failed half-way."""
        return await self._worker.complete(asked.prompt, asked, asked.prompt_logprobs, on_token)

    async def check_health(self) -> None:
        """Do nothing: as long as the process lives, so does the engine's thread."""

    async def load(self) -> dict[str, int]:
        """Return Engine.load."""
        return await self._worker.call(Engine.load)

    async def metrics(self) -> bytes:
        """Return nothing: the engine has no metrics beyond those of every instance."""
        return b""

    async def pause(self, abort: bool) -> None:
        """Call Engine.pause and wait until nothing runs."""
        await self._worker.pause(abort)

    async def resume(self) -> None:
        """Call Engine.resume."""
        await self._worker.call(Engine.resume)

    async def start_profile(self) -> None:
        """Make torch's profiler record the engine's thread."""
        if self._profile is None:
            raise BadInput(NO_PROFILES)
        self._recording = torch_profiler(self._profile.parent, self._profile.name, [ProfilerActivity.CPU])
        await self._worker.call(lambda engine: self._recording.start())

    async def stop_profile(self) -> None:
        """Write the recorded profile. Nothing is sampled during this."""
        await self._worker.call(lambda engine: self._recording.stop())

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """Return the log-probabilities of RolloutModel.scored_prefill."""
        return await self._worker.call(lambda engine: engine.model.scored_prefill(list(token_ids))[1])

    async def reset_prefix_cache(self) -> None:
        """Call PromptCache.drop_prompts."""
        await self._worker.call(lambda engine: engine.prompts.drop_prompts())

    # weights --------------------------------------------------------------------------------------

    async def connect(self, init_info: JsonObject) -> None:
        """Call Receiver.connect, which cancels a transfer or a connect in progress."""
        await asyncio.to_thread(self._receiver.connect, init_info)

    def close(self) -> None:
        """Cancel transfers in progress and leave the groups."""
        self._receiver.close()

    async def start_update(self) -> None:
        """Call Engine.start_update once the running step has ended."""
        async with self._step:
            if self._loading is not None:
                await asyncio.gather(self._loading, return_exceptions=True)  # a bucket of the update that is restarted
                self._loading = None
            await self._worker.call(Engine.start_update)

    async def update(self, update_info: JsonObject) -> None:
        """Receive and load a bucket, or begin to stage it.

        A malformed update_info is refused without effect; any later failure ends the update. A broadcast bucket is
        verified and loaded while the next one is received, so its error is raised by the next call.
        """
        if update_info.get("staged"):
            self._receiver.stage(update_info)
        else:
            async with self._step:
                await self._receive_bucket(update_info)

    async def finish_update(self, version: int) -> int:
        """Call Engine.finish_update once every bucket is loaded. Return Engine.version."""
        async with self._step:
            await self._wait_for_previous()
            await self._worker.call(lambda engine: engine.finish_update(version))
            return await self._worker.call(lambda engine: engine.version)

    async def _receive_bucket(self, update_info: JsonObject) -> None:
        await self._worker.call(Engine.check_updating)
        self._receiver.check(update_info)
        transport = update_info.get("transport")
        if transport not in BACKENDS:
            await self._wait_for_previous()
            await self._load_bucket(
                lambda: list(self._receiver.receive(update_info, Path(self.model))), cast=transport == "base"
            )
            return
        places = await self._worker.call(lambda engine: engine.lend(update_info["names"]))
        try:
            verify = await asyncio.to_thread(self._receiver.fetch, update_info, places)
        except MetronomeError:
            await self._wait_for_previous()
            await self._worker.call(Engine.fail_update)
            raise
        await self._wait_for_previous()
        self._loading = asyncio.create_task(self._load_bucket(verify))

    async def _wait_for_previous(self) -> None:
        """Wait until the previous bucket is loaded. Raises its error."""
        loading = self._loading
        self._loading = None
        if loading is not None:
            await loading

    async def _load_bucket(self, receive: Callable[[], list[Named]], cast: bool = False) -> None:
        try:
            tensors = await asyncio.to_thread(receive)
        except MetronomeError:
            await self._worker.call(Engine.fail_update)
            raise
        await self._worker.call(lambda engine: engine.update(tensors, cast))
