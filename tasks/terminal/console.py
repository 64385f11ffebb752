"""The console output of a run: plain lines for a terminal or a log file, with colours on a terminal."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.errors import clean_text, counted
from engine.run.run_status import RECENT, time_left

LINES_PER_RUN = 20
"""Approximate number of step lines per run; there are more if steps are slow."""
QUIET_S = 10.0
"""If the last line is older than this (in seconds), the next step always prints a line."""
SHOW_CURSOR = b"\x1b[?25h"
"""The escape sequence that shows a terminal's cursor again after an interrupted progress bar."""
WARNINGS = ("warning", "rewards", "responses", "instances")
"""Stages whose lines have another colour on a terminal."""

Listener = Callable[[int, str], None]
"""Receives what is printed: its level as in `logging`, and the text."""


class OutputClosed(SystemExit):
    """No process reads the output any more."""


class _Output:
    """What this process has printed."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        """Monotonic time of the last line."""
        self.unread = False
        """Whether the reader of the output has gone."""
        self.listeners: list[Listener] = []
        self.mark = ""
        """What each line begins with, after the time; "" for lines without both."""


_output = _Output()


def say(stage: str, text: str) -> None:
    """Print a line immediately, cleaned (`engine.errors.clean_text`); further lines stand below its text. If no process
    reads the output any more (a Prefect worker was killed), this process ends as after a crash."""
    text = re.sub("\n *", f"\n{'':13}", clean_text(text))
    colour = ("33" if stage in WARNINGS else "1;36") if is_terminal() and not os.environ.get("NO_COLOR") else ""
    head = f"\x1b[{colour}m{stage:<12}\x1b[0m" if colour else f"{stage:<12}"
    _print(f"{head} {text}")
    _listen(logging.WARNING if stage in WARNINGS else logging.INFO, f"{stage:<12} {text}")


def _print(text: str) -> None:
    _output.last = time.monotonic()
    if _output.mark:
        text = f"{time.strftime('%H:%M:%S')} {_output.mark}: {text}"
    if not _output.unread:
        try:
            print(f"{text}\n", end="", flush=True)  # in one write, because another thread may print at the same time
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter also fails at exit
            _output.unread = True
    if _output.unread:  # seen now, or earlier in a thread that could not end this process
        raise OutputClosed("nobody reads the output any more")


def mark_lines(mark: str) -> None:
    """Begin each further line with the time and `mark`: in the output of a worker, which mixes those of its runs."""
    _output.mark = mark


def _listen(level: int, text: str) -> None:
    for listener in _output.listeners:
        listener(level, text)


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """During the body, also pass to `listener` everything that is printed."""
    _output.listeners.append(listener)
    try:
        yield
    finally:
        _output.listeners.remove(listener)


def last_line() -> float:
    """Monotonic time at which the last line was printed."""
    return _output.last


def is_terminal() -> bool:
    """Whether the output goes to a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextmanager
def print_stage(name: str) -> Iterator[Callable[[str], None]]:
    """Print the start of a stage, and at its end the result and the elapsed seconds. Call the yielded function to set
    the result."""
    started = time.monotonic()
    result = ["done"]
    say(name, "...")
    yield lambda text: result.__setitem__(0, text)
    say(name, f"{result[0]}  [{time.monotonic() - started:.1f} s]")


class StepLines:
    """Prints a line for the first, the last and about every `steps / 20`th step, and more often if steps are slow."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._every = max(1, steps // LINES_PER_RUN)
        self._printed = 0.0
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=RECENT)

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Take the next line of steps.jsonl."""
        done = row["step"] + 1
        self._rows.append(row)
        due = done % self._every == 0 or done in (1, self._steps) or time.monotonic() - self._printed > QUIET_S
        if due:
            self._printed = time.monotonic()
            say("train", step_text([*self._rows], self._steps))


def step_text(rows: Sequence[Mapping[str, Any]], steps: int) -> str:
    """Where a training of `steps` steps is, after these lines of steps.jsonl: step, reward, speed, time left."""
    row = rows[-1]
    return (
        f"{row['step'] + 1:>{len(f'{steps:,}')},}/{counted(steps, 'step')}  reward {row['reward_mean']:.3f}  "
        f"{row['tokens_per_s_per_device']:,.0f} tokens/s/device  {format_duration(time_left(rows, steps))} left"
    )


def format_duration(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def print_table(title: str, rows: Mapping[str, str]) -> None:
    """Print a two-column table."""
    width = max(map(len, rows))
    lines = "\n".join(f"  {name:<{width}}  {clean_text(value)}" for name, value in rows.items())
    _print(f"\n{title}\n{lines}")
    _listen(logging.INFO, f"{title}\n{lines}")


def print_page(text: str) -> None:
    """Print a text of any length in the lines that it has."""
    _print("\n".join(clean_text(line, sys.maxsize) for line in text.split("\n")))


def print_error(message: str) -> None:
    """Print a message on stderr: the error of a failed command, or a warning."""
    message = clean_text(message)
    print(message, file=sys.stderr, flush=True)
    _output.last = time.monotonic()
    _listen(logging.WARNING if message.startswith("warning: ") else logging.ERROR, message)


def own_program(name: str) -> str:
    """A program of this Python's environment, as a shell in the current folder calls it."""
    program = Path(sys.executable).with_name(name)
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)


REFUSED = " (refused)"
"""End of the name of a flow run whose settings were refused."""
DEPLOY = "METRONOME_DEPLOY"
"""Environment variable of a flow run: NAME of the `metronome deploy --name NAME` that made its deployment."""


def named_deployment(name: str, deploy: str | None = None) -> str:
    """The name of a deployment of infra/prefect.yaml as a deploy named it, by default the one of this flow run."""
    deploy = os.environ.get(DEPLOY, "") if deploy is None else deploy
    return f"{deploy}-{name}" if deploy else name
