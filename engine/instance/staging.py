"""Weights that are received while an instance still generates with the old ones."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from engine.errors import BadInput, DeadlineError, MetronomeError

NOTHING = torch.empty(0, dtype=torch.uint8)

Named = tuple[str, Tensor]
Job = Callable[[Tensor], tuple[list[Named], Tensor]]
"""Receives a bucket into the given buffer, or a larger one of its own. Returns the tensors and the buffer used."""


class StagedVersion:
    """Buckets of one version that are received in the background, one after the other."""

    def __init__(self, version: int, before: StagedVersion | None) -> None:
        """`before`: the version staged last, whose memory is used again once its buckets are received."""
        self.version = version
        self._before = before
        self._spare: list[Tensor] = []
        self._buffers: list[Tensor] = []
        self._jobs: list[Job] = []
        self._found: list[Named] = []
        self._error: MetronomeError | None = None
        self._changed = threading.Condition()
        self._done = 0
        self._running = False

    def add(self, receive: Job) -> None:
        """Add a bucket; `receive` is called in the background, after those of the earlier buckets."""
        with self._changed:
            self._jobs.append(receive)
            if not self._running:
                self._running = True
                threading.Thread(target=self._receive_all, name="stage-weights", daemon=True).start()

    def tensors(self, timeout_s: float) -> list[Named]:
        """Return all staged tensors once they are received. Raise the error of a failed bucket, or DeadlineError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._done == len(self._jobs) or self._error is not None, timeout_s):
                raise DeadlineError(
                    f"bucket {self._done} of the staged weight version {self.version} did not come "
                    f"within {timeout_s:g} s"
                )
            if self._error is not None:
                raise self._error
            return list(self._found)

    def _receive_all(self) -> None:
        """Receive buckets until none is left or a transfer fails; the buckets after a failed transfer are lost too."""
        if self._before is not None:
            self._spare = self._before.idle()
            self._before = None
        while (job := self._next_job()) is not None:
            found: list[Named] = []
            buffer = NOTHING
            error = None
            try:
                found, buffer = job(self._spare[self._done] if self._done < len(self._spare) else NOTHING)
            except MetronomeError as raised:
                error = raised
            with self._changed:
                self._found += found
                self._buffers.append(buffer)
                self._done += 1
                self._error = self._error or error
                self._changed.notify_all()

    def _next_job(self) -> Job | None:
        """Return the next bucket's job; None if there is none, or a transfer has failed.

        After a bucket with wrong content (BadInput) the next ones are still received, because they are already sent.
        """
        with self._changed:
            broken = self._error is not None and not isinstance(self._error, BadInput)
            if self._done == len(self._jobs) or broken:
                self._running = False
                return None
            return self._jobs[self._done]

    def idle(self) -> list[Tensor]:
        """Return the buffers of this version; none while something may still be received into them."""
        with self._changed:
            return [] if self._running else self._buffers
