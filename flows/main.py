"""Entry point of the console script `metronome`. Ctrl-C ends it with one line even while it loads the libraries."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line of `flows.cli`. Once its commands begin, they handle signals themselves."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    from engine.run.logs import clean_tracebacks

    clean_tracebacks()  # typer keeps the hook that it finds when it is imported
    from flows.cli import main as command  # takes seconds, and more on a busy machine

    command()


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, f"\ninterrupted by {signal.Signals(number).name}; nothing had started\n".encode())
    os._exit(130)
