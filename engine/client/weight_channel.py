"""What the trainer's publisher needs to publish through the service: a channel and a rank that is alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from engine.errors import DeadlineError
from engine.wire.messages import Answer, ControlRequest, MayPublish, Message

M = TypeVar("M", bound=Message)
S = TypeVar("S", bound=msgspec.Struct)


class WeightChannel:
    """The control channel of a trainer outside: its messages go to POST /weight_sync_notify."""

    def __init__(self, ask: Callable[[str, ControlRequest[Any]], Any]) -> None:
        self._ask = ask

    def ask(self, request: ControlRequest[Answer]) -> Answer:
        """Send a request and wait for its reply."""
        reply: Answer = self._ask("weight_sync_notify", request)
        return reply

    def wait_until_allowed(self, version: int, timeout_s: float) -> None:
        """Wait until the version may be published. Raises DeadlineError."""
        deadline = time.monotonic() + timeout_s
        while not self.ask(MayPublish(version=version)).now:
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"weight version {version} could not be published within {timeout_s:g} s: batches in flight are "
                    "still being sampled"
                )


class OneRank:
    """A trainer of one process: it exports and sends the whole model."""

    exports = True
    writes = True
    stage = 0

    def from_first(self, act: Callable[[], M]) -> M:
        """The result of `act`."""
        return act()

    def gather(self, message: S) -> list[S]:
        """The one rank's message."""
        return [message]
