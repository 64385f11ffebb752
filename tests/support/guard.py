"""Runs a program that does not know lifelines, and ends it when the parent ends.

Servers and workers of other projects outlive a killed parent. The guard leads their process group, watches the lifeline
(engine.run.process) and ends as the program did: with its exit status, or by its signal.
"""

import os
import signal
import subprocess
import sys

from engine.run.process import watch_lifeline


def guarded_command(arguments):
    """Command line that runs `arguments` under a guard."""
    return [sys.executable, __file__, *arguments]


def main():
    """Run the program to its end. Return its exit status, or die of the signal of which it died, so that the parent can
    name it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # the program gets the signal as well; the guard ends after it
    watch_lifeline()
    code = subprocess.Popen(sys.argv[1:]).wait()
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return abs(code)


if __name__ == "__main__":
    sys.exit(main())
