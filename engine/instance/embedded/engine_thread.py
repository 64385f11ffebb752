"""The thread that owns the engine, and the event loop's calls to it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

from engine.errors import DeadlineError, MetronomeError
from engine.instance.embedded.engine import Engine, SamplingRequest
from engine.instance.protocol import Sampling
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
