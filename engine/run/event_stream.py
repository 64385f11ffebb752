"""The one stream from an orchestrator to the process that started it: JSON lines on a pipe of its own.

A line is an object with one key. `step`: a line of steps.jsonl; `notice`: [stage, text]; `failed`: [name of the error,
message]; `progress`: [text, share or null], which comes every half second and so is the sign of life, too. The record
of a run is its folder: nothing is read from the stream that is not there.
"""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any, Literal

Kind = Literal["step", "notice", "failed", "progress"]

MOST_WAITING = 64 * 1024
"""Bytes that wait for the reader above which no progress is added."""
FLUSH_S = 5.0
"""Seconds that the writer waits at its end for a reader that does not read."""
PART = 64 * 1024


class EventWriter:
    """The orchestrator's end. It never waits for the reader, who may be stopped: steps, notices and failures are kept
    without bound until they can be written, and progress is left out. A reader that has gone is no error: the lifeline
    ends the orchestrator."""

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor`: the pipe, inherited from the reader. No child of this process gets it. None: nobody reads."""
        self._descriptor = descriptor
        self._waiting = bytearray()
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
            os.set_blocking(descriptor, False)

    def send(self, kind: Kind, content: Any) -> None:  # noqa: ANN401
        """Send one event."""
        if kind != "progress" or len(self._waiting) <= MOST_WAITING:
            self._waiting += json.dumps({kind: content}).encode() + b"\n"
        self._write()

    def close(self) -> None:
        """Give the reader `FLUSH_S` seconds to take what is left, and close the pipe."""
        until = time.monotonic() + FLUSH_S
        while self._waiting and self._descriptor is not None and (left := until - time.monotonic()) > 0:
            room = select.poll()
            room.register(self._descriptor, select.POLLOUT)
            room.poll(1000 * left)
            self._write()
        self._close()

    def _write(self) -> None:
        try:
            while self._waiting and self._descriptor is not None:
                del self._waiting[: os.write(self._descriptor, self._waiting[:PART])]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._close()
        self._waiting.clear()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


class EventReader:
    """The end of the process that starts an orchestrator. Use it in a `with` block, which closes it."""

    def __init__(self) -> None:
        """Make the pipe. `writer` is its other end, for the orchestrator; close it here once that has started."""
        self._descriptor, self.writer = os.pipe()
        os.set_blocking(self._descriptor, False)
        self._ready = select.poll()
        self._ready.register(self._descriptor, select.POLLIN)
        self._begun = b""
        self._ended = False

    def __enter__(self) -> EventReader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self, wait_s: float) -> list[tuple[Kind, Any]]:
        """All events that have come, waiting up to `wait_s` seconds for the first. A half-written last one is left for
        a later call."""
        if self._ended:
            time.sleep(wait_s)
            return []
        self._ready.poll(1000 * wait_s)
        try:
            while part := os.read(self._descriptor, PART):
                self._begun += part
            self._ended = True
        except BlockingIOError:
            pass
        *lines, self._begun = self._begun.split(b"\n")
        return [pair for line in lines for pair in json.loads(line).items()]
