"""Runs a program that does not know lifelines, and ends it when the parent ends.

`python -m engine.run.guard PROGRAM ARGUMENT...`

Servers and workers of other projects outlive a killed parent. The guard leads their process group, watches the lifeline
(engine.run.process) and returns the program's exit status.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

from engine.run.process import python_command, watch_lifeline


def guarded_command(arguments: Sequence[str]) -> list[str]:
    """Command line that runs `arguments` under a guard."""
    return python_command("engine.run.guard", *arguments)


def main() -> int:
    """Run the program to its end. Return its exit status, or 128 + number for a signal."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # the program gets the signal as well; the guard ends after it
    watch_lifeline()
    code = subprocess.Popen(sys.argv[1:]).wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
