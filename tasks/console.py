"""What a person sees while a run goes on: plain lines, readable in a terminal and in a log file alike."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

LINES_PER_RUN = 20
"""About so many step lines are printed, more when steps are slow."""
QUIET_S = 10.0
"""Seconds after which a step line is printed in any case."""


def say(stage: str, text: str) -> None:
    """Print one line, at once. Whoever reads us being gone
    (a Prefect worker that was killed) ends us as a crash does."""
    try:
        print(f"{stage:<12} {text}", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter fails at its end, too
        raise SystemExit("nobody reads the output any more") from None


@contextmanager
def stage(name: str) -> Iterator[Callable[[str], None]]:
    """Announce a stage; call the yielded function with its result, which is printed with the seconds it took."""
    started = time.monotonic()
    result = ["done"]
    say(name, "...")
    yield lambda text: result.__setitem__(0, text)
    say(name, f"{result[0]}  [{time.monotonic() - started:.1f} s]")


class StepLines:
    """Prints a line for the first, the last and about every `steps / 20`th step."""

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
    """Print a short two-column table."""
    width = max(map(len, rows))
    print(f"\n{title}\n" + "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items()), flush=True)


def complain(message: str) -> None:
    """The one message of a failed command, on stderr."""
    print(message, file=sys.stderr, flush=True)
