"""The thread that owns the engine, and the event loop's calls to it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from engine.errors import DeadlineError, MetronomeError
from engine.instance.embedded.engine import Engine, SamplingRequest
from engine.instance.embedded.sampling import Sampling
from engine.instance.replies import Result

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
        future: asyncio.Future[Result] = self._loop.create_future()
        request = SamplingRequest(prompt, sampling, lambda result: self._resolve(future, result), score_prompt)
        if on_token is not None:
            request.on_token = lambda token, logprob: self._tell(on_token, token, logprob)
        self._calls.put(lambda: self._submit(request, future))
        try:
            return await future
        finally:
            if future.cancelled():
                self._calls.put(lambda: self._engine.cancel(request))

    def _tell(self, on_token: Callable[[int, float], None], token: int, logprob: float) -> None:
        self._loop.call_soon_threadsafe(on_token, token, logprob)

    def _submit(self, request: SamplingRequest, future: asyncio.Future[Result]) -> None:
        try:
            self._engine.submit(request)
        except MetronomeError as error:
            self._loop.call_soon_threadsafe(_fail, future, error)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Call a function with the engine between two steps. Return its result, or raise its MetronomeError."""
        future: asyncio.Future[T] = self._loop.create_future()

        def carry_out() -> None:
            try:
                self._resolve(future, function(self._engine))
            except MetronomeError as error:
                self._loop.call_soon_threadsafe(_fail, future, error)

        self._calls.put(carry_out)
        return await future

    async def pause(self, abort: bool) -> None:
        """Call Engine.pause and wait until nothing runs."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._calls.put(lambda: self._engine.pause(abort, lambda: self._resolve(future, None)))
        await future

    def _resolve(self, future: asyncio.Future[T], value: T) -> None:
        self._loop.call_soon_threadsafe(_succeed, future, value)

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


def _succeed(future: asyncio.Future[T], value: T) -> None:
    if not future.done():  # else it was cancelled because the client has left
        future.set_result(value)


def _fail(future: asyncio.Future[T], error: MetronomeError) -> None:
    if not future.done():
        future.set_exception(error)
