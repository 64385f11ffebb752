"""Reading a record for a replay: the work that one unit of the trainer did in each step, in its order of training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from engine.errors import BadInput
from engine.types import Group, Landed
from engine.wire.columns import open_landed
from engine.wire.record import RecordEntry, read


class Replay:
    """One unit's work of a recorded run, step by step. It takes the place of the table."""

    def __init__(self, path: Path, unit: int, expected: int, reward_weights: Mapping[str, float]) -> None:
        """`expected`: groups of a complete step."""
        self._expected = expected
        self._weights = reward_weights
        self._mine: dict[int, list[RecordEntry]] = {}
        self._groups: dict[int, int] = {}
        for entry in read(path):
            self._groups[entry.step] = self._groups.get(entry.step, 0) + entry.size
            if entry.unit == unit:
                self._mine.setdefault(entry.step, []).append(entry)

    def work(self, step: int) -> Iterator[list[Group] | list[Landed]]:
        """Yield the unit's windows and early work of a step. Raises BadInput unless all groups of the step were
        recorded."""
        count = self._groups.get(step, 0)
        if count != self._expected:
            raise BadInput(
                f"--replay: the record holds {count} groups of step {step}, train.prompts_per_step is "
                f"{self._expected}; replay with the recorded run's own config.toml and no more steps than it trained"
            )
        for entry in self._mine.get(step, []):
            yield entry.window(self._weights) or list(map(open_landed, entry.landed))
