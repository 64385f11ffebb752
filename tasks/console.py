"""The console output of a run: plain lines, readable in a terminal and in a log file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

LINES_PER_RUN = 20
"""Approximate number of step lines per run; there are more if steps are slow."""
QUIET_S = 10.0
"""If the last line is older than this, the next step prints a line in any case. In seconds."""


def say(stage: str, text: str) -> None:
    """Print one line, at once. If no process reads the output any more (a Prefect worker was killed), this process ends
    as in a crash."""
    try:
        print(f"{stage:<12} {text}", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter also fails at its end
        raise SystemExit("nobody reads the output any more") from None


@contextmanager
def stage(name: str) -> Iterator[Callable[[str], None]]:
    """Print the start of a stage, and at its end the result and the seconds. Call the yielded function with the
    result."""
    started = time.monotonic()
    result = ["done"]
    say(name, "...")
    yield lambda text: result.__setitem__(0, text)
    say(name, f"{result[0]}  [{time.monotonic() - started:.1f} s]")


class StepLines:
    """Prints a line for the first, the last and about every `steps / 20`th step, and more if steps are slow."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._every = max(1, steps // LINES_PER_RUN)
        self._printed = 0.0
        self._seconds: list[float] = []

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Take the next line of steps.jsonl."""
        done = row["step"] + 1
        self._seconds = [*self._seconds[-9:], row["step_s"]]
        due = done % self._every == 0 or done in (1, self._steps) or time.monotonic() - self._printed > QUIET_S
        if due:
            self._printed = time.monotonic()
            left = (self._steps - done) * sum(self._seconds) / len(self._seconds)
            say(
                "train",
                f"step {done:>{len(str(self._steps))}}/{self._steps}  reward {row['reward_mean']:.3f}  "
                f"{row['tokens_per_s_per_device']:,.0f} tokens/s/device  {duration(left)} left",
            )


def duration(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def table(title: str, rows: Mapping[str, str]) -> None:
    """Print a two-column table."""
    width = max(map(len, rows))
    print(f"\n{title}\n" + "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items()), flush=True)


def complain(message: str) -> None:
    """Print a message on stderr: the error of a failed command, or a warning."""
    print(message, file=sys.stderr, flush=True)
