"""What is said when a trainer rank runs out of device memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.config import Config
from engine.config.keys import flatten
from engine.errors import DeviceMemoryError
from engine.model.shape import read_shape
from engine.platform import Platform
from engine.run.memory import LOWERED_BY, Term, readable, trainer_need

TOLERANCE = 1.05
"""The dry run's sum of what is held between two steps is exact but for small tensors."""
RECOMPUTE = "train.recompute"
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class MemoryWatch:
    """Compares what a rank holds with the dry run's sum (engine.run.memory) when its device has no memory left."""

    def __init__(self, config: Config, platform: Platform, rank: str, folder: Path) -> None:
        """`rank`: its name; `folder`: the logs of the run, which get torch's table."""
        self._config = config
        self._platform = platform
        self._rank = rank
        self._file = folder / f"{rank}-memory.txt"
        self._when = "while it loaded its models"
        self._held: int | None = None

    def begin(self, step: int) -> None:
        """A step begins."""
        self._when = f"in step {step}"
        self._held = self._platform.held_bytes()

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Raise DeviceMemoryError where the body runs out of device memory, and write torch's table of it."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            said = str(error).strip().splitlines()[0] if str(error).strip() else "out of memory"
            wanted = self._platform.held_bytes() + _asked(said)
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(f"{error}\n\n{self._platform.memory_summary()}")
            compared = self._compared(max(wanted, self._platform.peak_bytes()))
            raise DeviceMemoryError(
                f"{self._rank} ran out of memory {self._when}: {compared}. torch says: {said} Its table of the memory: "
                f"{self._file}"
            ) from None

    def _compared(self, most: int) -> str:
        """Which part of the dry run's sum was exceeded, and the keys that lower it. `most`: bytes, with those that were
        asked for last."""
        need = trainer_need(read_shape(Path(self._config.model.path)), self._config)
        states = need.part(states=True)
        working = need.part(states=False)
        held = self._held if self._held is not None else most
        expected = sum(term.bytes for term in states)
        if held > TOLERANCE * expected or self._held is None:
            when = "at the step's begin" if self._held is not None else "then"
            return f"{readable(held)} were held {when}, where the dry run counts {self._listed(states)}"
        if most > expected + sum(term.bytes for term in working):
            return (
                f"{readable(most)} were needed, {readable(held)} of them at the step's begin, as the dry run counts; "
                f"for the work of a step it counts {self._listed(working)}"
            )
        return (
            f"{readable(most)} were needed, no more than the dry run counts: the device has less, another process uses "
            f"it, or its memory is fragmented. It counts {self._listed((*states, *working))}"
        )

    def _listed(self, terms: Sequence[Term]) -> str:
        values = flatten(self._config.model_dump())
        keys = dict.fromkeys(key for term in terms for key in LOWERED_BY[term.name])
        parts = " + ".join(f"{term.name} {readable(term.bytes)}" for term in terms)
        total = readable(sum(term.bytes for term in terms))
        settings = ", ".join(f"{key} (now {json.dumps(values[key])})" for key in keys)
        return f"{parts} = {total}. Keys that lower it: {settings}{self._softer() if RECOMPUTE in keys else ''}"

    def _softer(self) -> str:
        """The next value of train.recompute, which costs the least time."""
        now = self._config.train.recompute
        if now is False:
            return f'; of {RECOMPUTE} try "selective" first, it costs little time'
        if now is True:
            return ""
        start = "a number above a third of a stage's layers" if now == "selective" else "a larger number of layers"
        return f"; of {RECOMPUTE} try {start}, and true last"


def _asked(said: str) -> int:
    """The bytes that torch could not allocate, by its message; 0 if it does not say so."""
    found = re.search(r"Tried to allocate ([\d.]+) ([KMG]iB)", said)
    return int(float(found[1]) * UNITS[found[2]]) if found else 0
