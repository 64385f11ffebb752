"""Measures the start of a command: seconds from Enter to the first line with a reward, and to the refusal of a typo.

    python benchmarks/start_up.py [--against ../before] [--repeats 3] [--commands typo-run,typo-train,train,run]

`train` and `run` start the quickstart in a new folder, and are ended at their first step's line. With `--against`, this
checkout and another one (with an environment of its own in `.venv`) take turns. CPU seconds are those of the command
and of all its processes until then: other jobs on the machine disturb them less than wall time. Last line: RESULT
{json}, medians.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

HOME = Path(__file__).parents[1]
COMMANDS = {
    "typo-run": (["run", "--set", "train.stepz=3"], "error: "),
    "typo-train": (["train", "--set", "train.stepz=3"], "error: "),
    "train": (["train"], "reward 0."),
    "run": (["run"], "reward 0."),
}
"""Arguments, and what the line has for which it waits."""


def cpu_s(process: psutil.Process) -> dict[str, float]:
    """CPU seconds of a process and of those that it started, also ended ones, by the module that each runs."""
    found: dict[str, float] = {}
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
            words = one.cmdline()
        except psutil.Error:
            continue
        name = words[words.index("-m") + 1] if "-m" in words else Path(words[1] if words[1:] else one.name()).name
        ended = times.children_user + times.children_system
        found[name] = found.get(name, 0.0) + times.user + times.system
        found["ended processes"] = found.get("ended processes", 0.0) + ended
    return {name: round(seconds, 2) for name, seconds in found.items() if seconds >= 0.005}


def measure(checkout: Path, command: str) -> tuple[float, dict[str, float]]:
    """Wall seconds to the line, and CPU seconds by process until then."""
    arguments, wanted = COMMANDS[command]
    with tempfile.TemporaryDirectory(prefix="start-up-") as folder:
        sets = [part for one in (f"run.output={folder}", "run.name=first") for part in ("--set", one)]
        began = time.monotonic()
        child = subprocess.Popen(
            [str(checkout / ".venv/bin/metronome"), *arguments, *sets],
            cwd=checkout,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "MLFLOW_TRACK"))},
        )
        assert child.stdout is not None
        process = psutil.Process(child.pid)
        line = next((line for line in child.stdout if wanted in line), None)
        if line is None:
            raise SystemExit(f"{command} of {checkout} ended without {wanted!r}")
        seconds = time.monotonic() - began
        ends = command.startswith("typo")
        spent = {} if ends else cpu_s(process)
        for _ in range(0 if ends else 2):  # the second ends it at once
            child.send_signal(signal.SIGINT)
            time.sleep(0.5)
        child.stdout.read()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        child.wait()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if ends:
            own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            return seconds, {"metronome": round(own, 2)}
        time.sleep(2.0)  # its processes end, which write in the folder
    return seconds, spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commands", default=",".join(COMMANDS))
    given = parser.parse_args()
    sides = {"here": HOME} | ({"against": given.against.resolve()} if given.against else {})
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(given.repeats):
        for command in given.commands.split(","):
            for side, checkout in sides.items():
                seconds, spent = measure(checkout, command)
                found.setdefault(f"{command} {side}", []).append((seconds, sum(spent.values())))
                print(f"{command} {side}: {seconds:.1f} s, CPU {sum(spent.values()):.1f} s: {spent}", flush=True)
    medians = {
        name: {"wall_s": round(median(wall for wall, _ in rows), 1), "cpu_s": round(median(cpu for _, cpu in rows), 1)}
        for name, rows in found.items()
    }
    print("RESULT " + json.dumps({"repeats": given.repeats, **medians}))


if __name__ == "__main__":
    main()
