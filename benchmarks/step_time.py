"""Compares the time of the quickstart's steps with that of another checkout of this repository: `python
benchmarks/step_time.py --against OTHER_CHECKOUT [--pairs 4] [--steps 14]`. Or, within one run, with the page of
`metronome watch` open in a Chromium on the same machine: `python benchmarks/step_time.py --page [--steps 60]`

Each pair runs the orchestrator of both checkouts, in turn, on the same model and with the same keys. A run's figure is
the median of step_s (steps.jsonl) without the first two steps, in which processes warm up. Printed is each pair's
ratio, this checkout over the other: below 1, this one is faster. Last line: RESULT {json}.

With --page, the page is closed and open in turn, for BLOCK steps each, of which the first does not count: a browser
starts in it. The ratio is the median time of a step without the page over that with it. Also printed is the CPU time of
server and browser per second in which the page is open, in cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from common import QUICKSTART_MODEL, result, run_orchestrator

from engine.config.recipe import HOME
from engine.run.files import read_lines

RUN = "import json, sys; from common import run_orchestrator; print(run_orchestrator(json.loads(sys.argv[1])).folder)"
WARM_UP = 2
BLOCK = 6
LOOK_S = 0.1
SERVE = "import sys; from pathlib import Path; from functools import partial; from engine.tools.watch.server import *; "
SERVE += "serve_page(Path(sys.argv[1]), '127.0.0.1', 0, partial(print, flush=True))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sides = parser.add_mutually_exclusive_group(required=True)
    sides.add_argument("--against", type=Path, help="the other checkout")
    sides.add_argument("--page", action="store_true", help="compare with the page of the run open")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=14, help="of each run; with --page 60 or more")
    parser.add_argument("--output", type=Path, default=Path("runs/step_time"))
    arguments = parser.parse_args()
    output = arguments.output.resolve()
    output.mkdir(parents=True)  # runs of an earlier call there would be mixed with these
    model = QUICKSTART_MODEL
    if arguments.page:
        with_page(output, arguments.steps)
        return
    ratios = []
    for pair in range(arguments.pairs):
        sides = {"this": HOME, "other": arguments.against.resolve()}
        order = sorted(sides, reverse=pair % 2 == 0)  # who is first alternates
        seconds = {
            side: step_s(
                sides[side],
                {
                    "model.path": str(model),
                    "run.output": str(output),
                    "run.name": f"{side}-{pair}",
                    "train.steps": arguments.steps,
                    "checkpoint.every": 0,
                },
            )
            for side in order
        }
        ratios.append(seconds["this"] / seconds["other"])
        told = ", ".join(f"{side} {seconds[side]:.3f} s" for side in sides)
        print(f"pair {pair}: {told}: {ratios[-1]:.3f}", flush=True)
    result({"pairs": len(ratios), "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)})


def with_page(output: Path, steps: int) -> None:
    settings = {"model.path": str(QUICKSTART_MODEL), "run.output": str(output), "run.name": "watched"}
    settings |= {"train.steps": str(steps), "checkpoint.every": "0"}
    run = threading.Thread(target=run_orchestrator, args=(settings, None, 3600.0))
    run.start()
    file = output / "watched/steps.jsonl"
    page = None
    seconds = {"without": [], "with": []}
    shares = {"server": [], "browser": []}
    seen = 0
    while run.is_alive():
        rows = list(read_lines(file)) if file.exists() else []
        for row in rows[seen:]:
            if row["step"] >= WARM_UP and row["step"] % BLOCK:
                seconds["with" if page is not None else "without"].append(row["step_s"])
        seen = len(rows)
        wanted = seen // BLOCK % 2 == 1
        if wanted and page is None:
            page = Watched(file.parent)
        elif not wanted and page is not None:
            for name, share in page.close().items():
                shares[name].append(share)
            page = None
        time.sleep(LOOK_S)
    if page is not None:
        page.close()
    run.join()
    median = {name: statistics.median(found) for name, found in seconds.items()}
    cores = {name: round(statistics.median(found), 4) for name, found in shares.items()}
    counts = {name: len(found) for name, found in seconds.items()}
    result({"ratio": median["without"] / median["with"], "step_s": median, "steps": counts, "cores": cores})


class Watched:
    """The page of a run, served and open in a headless Chromium."""

    def __init__(self, folder: Path) -> None:
        found = os.environ.get("METRONOME_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
        if found is None:
            raise SystemExit("error: no Chromium in PATH or METRONOME_CHROMIUM")
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(folder)], stdout=subprocess.PIPE, text=True, cwd=HOME
        )
        assert self._server.stdout is not None
        url = self._server.stdout.readline().strip()
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [found, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1400,900"]
        self._browser = subprocess.Popen(
            [*command, f"--user-data-dir={self._profile.name}", "--remote-debugging-port=0", url],
            stderr=subprocess.DEVNULL,
        )
        time.sleep(5.0)  # it has started
        self._began = time.monotonic()
        self._before = self._cpu_s()

    def _cpu_s(self) -> dict[str, float]:
        return {"server": _cpu_s(self._server.pid), "browser": _cpu_s(self._browser.pid)}

    def close(self) -> dict[str, float]:
        """Close both; their CPU seconds per second."""
        spent = self._cpu_s()
        lasted = time.monotonic() - self._began
        for process in (self._browser, self._server):
            process.terminate()
            process.wait(30)
        self._profile.cleanup()
        return {name: (spent[name] - before) / lasted for name, before in self._before.items()}


def _cpu_s(pid: int) -> float:
    own = psutil.Process(pid)
    times = [one.cpu_times() for one in (own, *own.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def step_s(checkout: Path, settings: dict[str, str | int]) -> float:
    """Median seconds of a step of a run of this checkout's code."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(settings)],
        env={**os.environ, "PYTHONPATH": f"{checkout}:{checkout / 'benchmarks'}"},
        cwd=checkout,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    folder = Path(done.stdout.splitlines()[-1])
    return statistics.median(line["step_s"] for line in list(read_lines(folder / "steps.jsonl"))[WARM_UP:])


if __name__ == "__main__":
    main()
