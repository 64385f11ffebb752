"""Recording a run's groups, window by window, in their order of training, and replaying them (contract 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgpack

from engine.errors import BadInput
from engine.queue.codec import group_from_wire, group_to_wire
from engine.types import Group


class Recorder:
    """Appends each trained window to `record.msgpack`; micro-batches are a function of the window and need no record."""

    def __init__(self, path: Path, start: int) -> None:
        """On resume, steps from `start` on are cut off: they are redone."""
        kept = [window for window in read(path) if window[0].step < start] if path.exists() else []
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            file.writelines(_packed(window) for window in kept)
        partial.rename(path)
        self._file = path.open("ab")

    def add(self, window: Sequence[Group]) -> None:
        """Append a window that has been trained."""
        self._file.write(_packed(window))

    def flush(self) -> None:
        """Hand what was added to the system (once a step)."""
        self._file.flush()


def _packed(window: Sequence[Group]) -> bytes:
    return msgpack.packb([group_to_wire(group) for group in window])


def read(path: Path) -> Iterator[list[Group]]:
    """All windows of a record in order of training. Raises BadInput for a file that is no record."""
    try:
        with path.open("rb") as file:
            for window in msgpack.Unpacker(file, strict_map_key=False):
                yield [group_from_wire(group) for group in window]
    except FileNotFoundError:
        raise BadInput(f"--replay {path}: no such file; a run with train.record = true writes record.msgpack") from None
    except (msgpack.UnpackException, ValueError, TypeError, KeyError, IndexError) as error:
        raise BadInput(f"--replay {path}: not a record of train.record ({error})") from None


class Replay:
    """Stands in for the queue: yields the recorded windows of each step, synchronously."""

    def __init__(self, path: Path, expected: int) -> None:
        """`expected` groups make a step; one that was cut off can't be replayed."""
        self._expected = expected
        self._steps: dict[int, list[list[Group]]] = {}
        for window in read(path):
            self._steps.setdefault(window[0].step, []).append(window)

    def windows(self, step: int) -> Iterator[list[Group]]:
        """The windows of a step in their recorded order. Raises BadInput unless all of them were recorded."""
        found = self._steps.get(step, [])
        count = sum(len(window) for window in found)
        if count != self._expected:
            raise BadInput(
                f"--replay: the record holds {count} groups of step {step}, train.prompts_per_step is "
                f"{self._expected}; replay with the recorded run's own config.toml and no more steps than it trained"
            )
        yield from found
