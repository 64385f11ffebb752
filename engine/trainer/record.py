"""Recording a run's groups in their order of training, and replaying them (contract 2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgpack

from engine.errors import BadInput
from engine.queue.codec import group_from_wire, group_to_wire
from engine.types import Group


class Recorder:
    """Appends each trained group to `record.msgpack`; micro-batches are a function of the group and need no record."""

    def __init__(self, path: Path, start: int) -> None:
        """On resume, groups of steps from `start` on are cut off: those steps are redone."""
        kept = [group for group in read(path) if group.step < start] if path.exists() else []
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            file.writelines(msgpack.packb(group_to_wire(group)) for group in kept)
        partial.rename(path)
        self._file = path.open("ab")

    def add(self, group: Group) -> None:
        """Append a group that has been trained."""
        self._file.write(msgpack.packb(group_to_wire(group)))

    def flush(self) -> None:
        """Hand what was added to the system (once a step)."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> Iterator[Group]:
    """All groups of a record in order of training. Raises BadInput for a file that is no record."""
    try:
        with path.open("rb") as file:
            for wire in msgpack.Unpacker(file, strict_map_key=False):
                yield group_from_wire(wire)
    except FileNotFoundError:
        raise BadInput(f"--replay {path}: no such file; a run with train.record = true writes record.msgpack") from None
    except (msgpack.UnpackException, ValueError, TypeError, KeyError) as error:
        raise BadInput(f"--replay {path}: not a record of train.record ({error})") from None


class Replay:
    """Stands in for the queue: yields the recorded groups of each step, synchronously."""

    def __init__(self, path: Path, expected: int) -> None:
        """`expected` groups make a step; one that was cut off can't be replayed."""
        self._expected = expected
        self._steps: dict[int, list[Group]] = {}
        for group in read(path):
            self._steps.setdefault(group.step, []).append(group)

    def groups(self, step: int) -> Iterator[Group]:
        """The groups of a step in their recorded order. Raises BadInput unless all of them were recorded."""
        found = self._steps.get(step, [])
        if len(found) != self._expected:
            raise BadInput(
                f"--replay: the record holds {len(found)} groups of step {step}, train.prompts_per_step is "
                f"{self._expected}; replay with the recorded run's own config.toml and no more steps than it trained"
            )
        yield from found
