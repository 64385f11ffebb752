"""When each replica group of the trainer was last heard from, so that requests of other replica groups can't hide a
replica group that hangs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Liveness:
    """Keeps the time of the last sign of life of the trainer and of each replica group.

    A replica group is not silent while it waits for the orchestrator's reply, or when it has nothing left to do in the
    step.
    """

    def __init__(self) -> None:
        self._trainer = time.monotonic()
        self._answering = 0
        self._replica_groups: dict[int, float] = {}
        """By replica group with work left in the step: when it was last heard from; infinite while it waits for a
        reply."""

    @contextmanager
    def answering(self, replica_group: int | None) -> Iterator[None]:
        """Enter this context while a request is answered. It is a sign of life of the trainer and of the replica group
        that asks.

        `replica_group` None means that rank 0 asks for all replica groups, and all of them wait for the reply.
        """
        self._answering += 1
        self._note_sign_of_life(replica_group, math.inf)
        try:
            yield
        finally:
            self._answering -= 1
            self._trainer = time.monotonic()
            self._note_sign_of_life(replica_group, self._trainer)

    def _note_sign_of_life(self, replica_group: int | None, when: float) -> None:
        if replica_group is None:
            self._replica_groups = dict.fromkeys(self._replica_groups, when)
        elif replica_group in self._replica_groups:
            self._replica_groups[replica_group] = when

    def expect_requests(self, replica_groups: int) -> None:
        """Expect requests of each of the `replica_groups` replica groups from now on, until `expect_no_more`."""
        self._replica_groups = dict.fromkeys(range(replica_groups), time.monotonic())

    def expect_no_more(self, replica_group: int) -> None:
        """Expect no more requests of a replica group, which was told that the step has no more groups and waits for the
        other replica groups."""
        self._replica_groups.pop(replica_group, None)

    def longer_than(self, seconds: float) -> str | None:
        """Return "the trainer" or "replica group 1 of the trainer" if it has been silent for longer than `seconds`;
        else None."""
        now = time.monotonic()
        if not self._answering and now - self._trainer > seconds:
            return "the trainer"
        return next(
            (
                f"replica group {replica_group} of the trainer"
                for replica_group, heard in self._replica_groups.items()
                if now - heard > seconds
            ),
            None,
        )
