"""Compares the time of the quickstart's steps with that of another checkout of this repository: `python
benchmarks/step_time.py --against OTHER_CHECKOUT [--pairs 4] [--steps 14]`. Or, within one run, with the page of
`metronome watch` open in a Chromium on the same machine: `python benchmarks/step_time.py --page [--steps 160]`. Or with
the same processes where Ray has started them: `python benchmarks/step_time.py --ray [--pairs 4] [--steps 14]`

Each pair runs the orchestrator of both checkouts, in turn, on the same model and with the same keys. A run's figure is
the median of step_s (steps.jsonl) without the first two steps, in which processes warm up. Printed is each pair's
ratio, this checkout over the other: below 1, this one is faster. Last line: RESULT {json}.

With --page, the page is closed and open in turn, for BLOCK steps each. The first STARTING of them do not count: then a
browser starts. The ratio is the median time of a step without the page over that with it. Also printed is the CPU time
of server and browser per second in which the page is open, in cores.

With --ray, both sides have an orchestrator and INSTANCES instances that join. One side starts them on a Ray cluster of
one node, which runs for that time only; the other starts the same commands itself. The ratio is the other's step over
Ray's: below 1, Ray costs time. start_s are the seconds until Ray has started all processes, ray_cores is the CPU time
of Ray's own processes per second of the run, actors included. With --spare, both sides' runs have one core, and Ray has
another one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from common import QUICKSTART_MODEL, orchestrate, result, run_orchestrator

from engine.config.recipe import HOME, load_config
from engine.run.files import read_lines
from engine.run.folder import dump_config
from engine.run.process import Child, python_command, stop_all
from engine.wire.access_token import VARIABLE as TOKEN
from engine.wire.access_token import own_token

RUN = "import json, sys; from common import run_orchestrator; print(run_orchestrator(json.loads(sys.argv[1])).folder)"
WARM_UP = 2
BLOCK = 20
STARTING = 3
INSTANCES = 2
RAY_SIDE = "import json, sys; from step_time import run_side; run_side(*map(json.loads, sys.argv[1:]))"
RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_raylet_start_wait_time_s": "120",
}
"""Environment of a Ray cluster on this machine."""
LOOK_S = 0.1
SERVE = "import sys; from pathlib import Path; from functools import partial; from engine.tools.watch.server import *; "
SERVE += "serve_page(Path(sys.argv[1]), '127.0.0.1', 0, partial(print, flush=True))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sides = parser.add_mutually_exclusive_group(required=True)
    sides.add_argument("--against", type=Path, help="the other checkout")
    sides.add_argument("--page", action="store_true", help="compare with the page of the run open")
    sides.add_argument("--ray", action="store_true", help="compare with the same processes without Ray")
    parser.add_argument("--spare", action="store_true", help="with --ray: a core of its own for Ray")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=14, help="of each run; with --page 160 or more")
    parser.add_argument("--output", type=Path, default=Path("runs/step_time"))
    arguments = parser.parse_args()
    output = arguments.output.resolve()
    output.mkdir(parents=True)  # runs of an earlier call there would be mixed with these
    model = QUICKSTART_MODEL
    if arguments.page:
        with_page(output, arguments.steps)
        return
    if arguments.ray:
        with_ray(output, arguments.pairs, arguments.steps, arguments.spare)
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
            if row["step"] >= WARM_UP and row["step"] % BLOCK >= STARTING:
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


def with_ray(output: Path, pairs: int, steps: int, spare: bool) -> None:
    ratios = []
    starts = []
    cores = []
    for pair in range(pairs):
        seconds = {}
        for side in sorted(("alone", "ray"), reverse=pair % 2 == 0):  # who is first alternates
            settings = {"model.path": str(QUICKSTART_MODEL), "run.output": str(output), "run.name": f"{side}-{pair}"}
            settings |= {"train.steps": steps, "checkpoint.every": 0}
            found = json.loads(_in_checkout(HOME, RAY_SIDE, *map(json.dumps, (side, settings, spare))))
            seconds[side] = _median_step_s(Path(found["folder"]))
            if side == "ray":
                starts.append(found["start_s"])
                cores.append(found["ray_cores"])
        ratios.append(seconds["alone"] / seconds["ray"])
        told = ", ".join(f"{side} {found:.3f} s" for side, found in sorted(seconds.items()))
        took = f"Ray started in {starts[-1]:.1f} s and took {cores[-1]:.3f} cores"
        print(f"pair {pair}: {told}: {ratios[-1]:.3f}; {took}", flush=True)
    figures = {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    result({"pairs": pairs, **figures, "start_s": statistics.median(starts), "ray_cores": statistics.median(cores)})


def run_side(side: str, settings: dict[str, str | int], spare: bool) -> None:
    """Run one side of a pair with --ray. Print its folder, the seconds until all processes had started, and Ray's
    cores."""
    ray_cores = 0.0
    if spare:
        os.sched_setaffinity(0, [0])
    if side == "alone":
        os.environ[TOKEN] = own_token()
        with socket.create_server(("127.0.0.1", 0)) as free:
            settings["rollout.listen"] = f"127.0.0.1:{free.getsockname()[1]}"
        settings |= {"rollout.instances": 0}
        config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
        file = Path(config.run.output) / f"{config.run.name}-instances.toml"
        dump_config(config, file)
        serve = ["serve", str(file), "--join", config.rollout.listen, "--name"]
        began = time.monotonic()
        children = [
            Child(name, python_command("flows.cli", *serve, name), Path(config.run.output) / f"{name}-{side}.log")
            for name in (f"instance-{number}" for number in range(INSTANCES))
        ]
        start_s = time.monotonic() - began
        try:
            orchestrate(config)
        finally:
            stop_all(children)
    else:
        os.environ |= RAY
        from ray.cluster_utils import Cluster

        from tasks.cluster.ray.placement import running_on_ray

        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=INSTANCES + 1, include_dashboard=False, object_store_memory=80_000_000)
            settings |= {"cluster.engine": "ray", "cluster.address": cluster.address, "rollout.instances": INSTANCES}
            config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
            began = time.monotonic()
            with running_on_ray(config, config.folder) as placed:
                start_s = time.monotonic() - began
                if spare:
                    for thread in (one for process in _ray_processes() for one in process.threads()):
                        os.sched_setaffinity(thread.id, [1])
                before = _ray_cpu_s()
                began = time.monotonic()
                orchestrate(placed.config)
                ray_cores = (_ray_cpu_s() - before) / (time.monotonic() - began)
        finally:
            cluster.shutdown()
    print(json.dumps({"folder": str(config.folder), "start_s": start_s, "ray_cores": ray_cores}))


def _ray_processes() -> list[psutil.Process]:
    """The processes below this one that are Ray's, with its actors but not what these have started."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if process.name().startswith("ray::") or any("/ray/" in part for part in process.cmdline()[:3])
    ]


def _ray_cpu_s() -> float:
    """CPU seconds of Ray's processes so far."""
    times = [process.cpu_times() for process in _ray_processes()]
    return sum(one.user + one.system for one in times)


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
    return _median_step_s(Path(_in_checkout(checkout, RUN, json.dumps(settings))))


def _median_step_s(folder: Path) -> float:
    return statistics.median(line["step_s"] for line in list(read_lines(folder / "steps.jsonl"))[WARM_UP:])


def _in_checkout(checkout: Path, code: str, *arguments: str) -> str:
    """The last line that code prints with a checkout's modules."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": f"{checkout}:{checkout / 'benchmarks'}"},
        cwd=checkout,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout.splitlines()[-1]


if __name__ == "__main__":
    main()
