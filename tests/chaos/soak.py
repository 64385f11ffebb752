"""`python -m chaos.soak --steps 5000`: many small steps of an undisturbed run, and by how much each process grows.

Samples every process of the run: the flow's, orchestrator, agent, rank, instances, verifiers, the guest and the worker.
The last line is `RESULT` and an object of JSON.
"""

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil

from chaos import trial
from chaos.__main__ import said
from chaos.world import ROLES, Disturbed, World
from support.runs import save_model, save_problems

EVERY_S = 5.0
WARM_UP = 0.2
"""Share of the steps that does not count."""
KIB_PER_STEP = 5.0
DESCRIPTORS = 2
"""Most by which the open files and the threads of a process may change."""
LOG_MB_PER_HOUR = 1.0
STEP_S = 60.0
"""A step of a real run takes at least so long; small steps write their lines that much more often."""
HOUR_S = 3600.0


@dataclass(frozen=True)
class Sample:
    """One look at a process."""

    step: int
    memory: int
    """Bytes that are its own (Uss)."""
    shared: int
    """Bytes of shared memory that it has mapped and touched."""
    descriptors: int
    threads: int


def take(process, step):
    """A sample of a process that lives."""
    with process.oneshot():
        return Sample(
            step=step,
            memory=process.memory_full_info().uss,
            shared=_shared(process.pid),
            descriptors=process.num_fds(),
            threads=process.num_threads(),
        )


def _shared(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssShmem:"))


def slope(points):
    """Least squares of (x, y): how much y grows by x."""
    x_mean = statistics.fmean(x for x, _ in points)
    y_mean = statistics.fmean(y for _, y in points)
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    return sum((x - x_mean) * (y - y_mean) for x, y in points) / spread if spread else 0.0


def growth(samples):
    """Of one process after its warm-up: by step the KiB of memory and shared memory, and in all the change of open
    files and threads between the medians of its first and last fifth."""
    fifth = max(1, len(samples) // 5)

    def change(name):
        values = [vars(sample)[name] for sample in samples]
        return statistics.median(values[-fifth:]) - statistics.median(values[:fifth])

    return {
        "kib_per_step": round(slope([(one.step, one.memory / 1024) for one in samples]), 3),
        "shared_kib_per_step": round(slope([(one.step, one.shared / 1024) for one in samples]), 3),
        "descriptors": change("descriptors"),
        "threads": change("threads"),
    }


def verdict(by_process, log_bytes_per_step, zombies):
    """Sentences about what grows too much. `by_process`: what `growth` says of each."""
    problems = []
    for name, found in by_process.items():
        for key in ("kib_per_step", "shared_kib_per_step"):
            if found[key] >= KIB_PER_STEP:
                problems.append(f"{name}: {key} is {found[key]}, expected below {KIB_PER_STEP:g}")
        for key in ("descriptors", "threads"):
            if abs(found[key]) > DESCRIPTORS:
                problems.append(f"{name}: {key} changed by {found[key]:+g}, expected at most {DESCRIPTORS}")
    mb_per_hour = log_bytes_per_step * HOUR_S / STEP_S / 1e6
    if mb_per_hour >= LOG_MB_PER_HOUR:
        problems.append(f"logs grow by {mb_per_hour:.2f} MB an hour at a step a minute, expected {LOG_MB_PER_HOUR:g}")
    return problems + [f"zombie: {line}" for line in zombies]


def main():
    """Exit code 0 if nothing grows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / f"soak-{time.time_ns()}")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the servers, the namespace and the file system
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True)
    model = save_model(folder / "model")
    with World(folder, model, save_problems(folder / "problems.jsonl")) as world:
        world.serve()
        result = soak(world, arguments.steps)
    print("RESULT " + json.dumps(result))
    if not result["problems"]:
        shutil.rmtree(folder)
    return 1 if result["problems"] else 0


def soak(world, steps):
    """Run so many steps, and look at the processes meanwhile."""
    samples = defaultdict(list)
    zombies = set()
    log_sizes = []
    with Disturbed(world, "soak", steps, said, changes={"checkpoint.every": 50}) as run:
        began = time.monotonic()
        while not run.look_after():
            step = run.progress.newest
            for name, process in processes_of(run):
                try:
                    if process.status() == psutil.STATUS_ZOMBIE:
                        zombies.add(name)
                    elif step > WARM_UP * steps:
                        samples[name].append(take(process, step))
                except psutil.Error:
                    continue
            if step > WARM_UP * steps:
                log_sizes.append((step, sum(file.stat().st_size for file in trial.logs(world, run) if file.exists())))
            time.sleep(EVERY_S)
        seconds = time.monotonic() - began
        unexpected = run.unexpected
    by_process = {name: growth(found) for name, found in sorted(samples.items()) if len(found) >= 10}
    per_step = slope(log_sizes)
    for name, found in by_process.items():
        said(f"{name:<24} {found}")
    problems = unexpected + verdict(by_process, per_step, sorted(zombies))
    if unseen := {*ROLES, "guest", "worker"} - {name.split()[0] for name in by_process}:
        problems.append(f"too few looks at: {', '.join(sorted(unseen))}")
    for problem in problems:
        said(f"FOUND: {problem}")
    return {
        "steps": steps,
        "seconds": round(seconds),
        "log_bytes_per_step": round(per_step),
        "processes": by_process,
        "problems": problems,
    }


def processes_of(run):
    """(name, process) of each; a name has the process id, so that one that is started again is another one."""
    for role in (*ROLES, "guest", "worker"):
        for process in run.processes(role):
            yield f"{role} {process.pid}", process


if __name__ == "__main__":
    sys.exit(main())
