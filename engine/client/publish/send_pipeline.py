"""A pipeline of threads: while one bucket is sent, the next is written and the one after it is gathered."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from engine.errors import DeadlineError, MetronomeError
from engine.wire.sync_messages import BucketInfo
from engine.wire.weights.buckets import Bucket

Step = Callable[[Bucket, BucketInfo], object]


class SendPipeline:
    """Takes buckets through steps, in order; each step has a thread of its own. After the last step a bucket is
    released.

    After an error the steps skip all buckets until `restart`.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        release: Callable[[Bucket], None],
        counted: int,
        timeout_s: float,
    ) -> None:
        """`release`: gives a bucket's memory back; `counted`: number of the first steps that `wait` waits for."""
        self._steps = steps
        self._release = release
        self._counted = counted
        self._timeout_s = timeout_s
        self._queues: list[queue.Queue[tuple[Bucket, BucketInfo]]] = [queue.Queue() for _ in steps]
        self._changed = threading.Condition()
        self._put = 0
        self._passed = [0] * len(steps)
        self._error: BaseException | None = None
        for number in range(len(steps)):
            threading.Thread(target=self._run_step, args=(number,), name=f"send-weights-{number}", daemon=True).start()

    def put(self, bucket: Bucket, info: BucketInfo) -> None:
        """Put a bucket into the first step's queue."""
        with self._changed:
            self._put += 1
        self._queues[0].put((bucket, info))

    def wait(self) -> None:
        """Wait until all buckets are through the counted steps. Raises the error of a step, or DeadlineError."""
        self._wait_for_steps(self._counted, "sent")

    def drain(self) -> None:
        """Wait until all buckets are through all steps. Raises the error of a step, or DeadlineError."""
        self._wait_for_steps(len(self._steps), "written")

    def idle(self) -> None:
        """Wait until no bucket is under way, or until the deadline. Raises nothing."""
        with self._changed:
            self._changed.wait_for(lambda: self._passed[-1] == self._put, self._timeout_s)

    def restart(self) -> None:
        """Wait until no bucket is under way, and forget the error of a step. Raises DeadlineError."""
        try:
            self.drain()
        except MetronomeError:
            with self._changed:
                self._error = None
            self.drain()

    def _wait_for_steps(self, steps: int, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._passed[steps - 1] == self._put, self._timeout_s):
                raise DeadlineError(
                    f"{self._put - self._passed[steps - 1]} buckets of weights were not {what} within "
                    f"{self._timeout_s:g} s"
                )
            if self._error is not None:
                raise self._error

    def _run_step(self, number: int) -> None:
        while True:
            bucket, info = self._queues[number].get()  # no deadline: having nothing to send is no error
            if self._error is None:
                try:
                    self._steps[number](bucket, info)
                except BaseException as error:  # noqa: BLE001 - raised again in `wait`
                    self._error = error
            if number + 1 < len(self._steps):
                self._queues[number + 1].put((bucket, info))
            else:
                self._release(bucket)
            del bucket, info  # else this thread would hold the tensors until the next bucket comes
            with self._changed:
                self._passed[number] += 1
                self._changed.notify_all()
