"""What must hold of a run whatever was done to it. Each check returns sentences about what does not hold."""

import hashlib
import math
import re
from collections import Counter, defaultdict
from typing import NamedTuple

from engine.run.files import read_lines
from support.runs import ROOT
from tasks.tracking.mirror import figure_name, metric_values

FORBIDDEN = ("Traceback", "JSONDecodeError", "ExceptionGroup")
FRAME = re.compile(r'File "([^"]+)", line')
OURS = re.compile(rf"{re.escape(str(ROOT))}/(engine|tasks|flows|tests)/")
"""Files of this project."""
FLOW_RUN_FAILED = ("Encountered exception during execution", "Engine execution exited with unexpected exception")
"""Words of Prefect's before the traceback of a flow run that has failed: of the flow, and of the process around it."""
FEWEST_FIGURES = 30
"""A run has at least so many figures of a step; fewer mean that the check of MLflow looked at nothing."""


def weights(folder):
    """SHA-256 of each file of weights of a policy."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("policy/*.safetensors")}


def same_weights(folder, undisturbed):
    """`undisturbed`: what `weights` said of the undisturbed run."""
    found = weights(folder)
    if not found or not undisturbed:
        return ["there are no final weights"]
    return [] if found == undisturbed else [f"the final weights differ: {found}, undisturbed {undisturbed}"]


def each_step_once(folder, steps):
    """steps.jsonl has each step once, in order."""
    found = [row["step"] for row in read_lines(folder / "steps.jsonl")]
    if found == list(range(steps)):
        return []
    counts = Counter(found)
    wrong = {step: counts[step] for step in sorted({*counts, *range(steps)}) if counts[step] != 1}
    return [f"steps.jsonl does not have each of {steps} steps once, in order: {_short(wrong or found)}"]


def wanted_figures(folder):
    """By name, the (step, time in ms) of each figure of steps.jsonl and of evaluations.jsonl."""
    wanted = defaultdict(list)
    for row in read_lines(folder / "steps.jsonl"):
        for name in metric_values(row):
            wanted[name].append((row["step"], round(row["ended_s"] * 1000)))
    for row in read_lines(folder / "evaluations.jsonl"):
        wanted[figure_name(row, "avg_at_k")].append((row["step"], round(row["ended_s"] * 1000)))
    return dict(wanted)


def each_figure_once(uri, folder):
    """One finished MLflow run has the figures of the run folder, each once; of steps that were trained again it
    may also have earlier ones."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiments = [one.experiment_id for one in client.search_experiments()]
    runs = client.search_runs(experiments, f"attributes.run_name = '{folder.name}'")
    if [run.info.status for run in runs] != ["FINISHED"]:
        return [f"MLflow has these runs of {folder.name}: {[(run.info.run_id, run.info.status) for run in runs]}"]
    wanted = wanted_figures(folder)
    found = {
        name: [(one.step, one.timestamp) for one in client.get_metric_history(runs[0].info.run_id, name)]
        for name in wanted
    }
    return compared_figures(wanted, found)


def compared_figures(wanted, found):
    """Both by name: the (step, time) of each figure."""
    problems = []
    if len(wanted) <= FEWEST_FIGURES:
        problems.append(f"a step has only {len(wanted)} figures")
    by_wrong = defaultdict(list)
    for name, points in wanted.items():
        have = Counter(found.get(name, ()))
        wrong = {point: have[point] for point in points if have[point] != 1}
        newest = dict(sorted(points))  # by step, its latest time
        wrong |= {point: have[point] for point in have if have[point] > 1 or point[1] > newest.get(point[0], -1)}
        if wrong:
            by_wrong[_short(wrong)].append(name)
    return problems + [
        f"MLflow has {', '.join(names)} so often at (step, time): {wrong}" for wrong, names in by_wrong.items()
    ]


def clean_logs(files, servers_went):
    """No traceback, and no error whose name is for programmers. Two kinds of tracebacks are excused, and nothing else:

    - `servers_went` (the Prefect server, the MLflow server or the S3 endpoint was killed), and no frame is of this
      project: its client's own code says that it is away;
    - Prefect says by which of this project's errors a flow run has failed.
    """
    problems = []
    for file in files:
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
        excused = set()
        for block in tracebacks(lines):
            if servers_went and not block.is_ours or block.ends_a_flow_run:
                excused.update(range(block.first, block.last + 1))
        for number, line in enumerate(lines):
            if number not in excused and any(word in line for word in FORBIDDEN):
                problems.append(f"{file.name}, line {number + 1}: {line.strip()[:200]}")
    return problems


class Block(NamedTuple):
    """A traceback in a log."""

    first: int
    last: int
    is_ours: bool
    """Whether a frame is of this project."""
    ends_a_flow_run: bool
    """Whether Prefect logged it with one of this project's errors."""


def tracebacks(lines):
    """Each traceback with the line that names the exception."""
    found = []
    for first, line in enumerate(lines):
        if "Traceback (most recent call last)" in line:
            last = first + 1
            while last < len(lines) and lines[last].startswith(" "):
                last += 1
            frames = FRAME.findall("\n".join(lines[first:last]))
            named = last < len(lines) and lines[last].startswith("engine.errors.")
            told = first > 0 and any(words in lines[first - 1] for words in FLOW_RUN_FAILED)
            found.append(
                Block(
                    first=first,
                    last=last,
                    is_ours=not frames or any(OURS.match(frame) for frame in frames),
                    ends_a_flow_run=named and told,
                )
            )
    return found


def none_left(processes):
    """`processes`: command lines by process id after the end of the run."""
    return [f"left behind: process {pid}, {line[:200]}" for pid, line in processes.items()]


def all_happened(given, skipped, spoiled):
    """Every fault of the schedule was given: `given` has (fault, moment), `skipped` what `Nemesis.skipped` says. A
    target may be absent while the run recovers from an earlier fault, but not while it trains. Faults of replies have
    spoiled some (`spoiled`)."""
    problems = [
        f"{fault.kind}, {fault.target} did not happen, although {steps} steps were finished meanwhile: {why}"
        for fault, why, steps in skipped
        if steps > 1  # the first may have been complete when an earlier fault struck
    ]
    asked = [fault for fault, _ in given if fault.target == "reply"]
    if asked and not spoiled:
        problems.append(f"no reply was spoiled, although {len(asked)} faults were to")
    return problems


def few_wasted(wasted, faults, every):
    """Steps that were trained again: at most those since the last checkpoint, for each fault."""
    limit = faults * every
    return [f"{wasted} steps were trained again, {limit} may be ({faults} faults x {every})"] if wasted > limit else []


def quick(recoveries, median_s, longest_s):
    """p50 and p99 of the recoveries are below these seconds."""
    problems = []
    for share, limit in ((0.5, median_s), (0.99, longest_s)):
        if recoveries and (found := percentile(recoveries, share)) > limit:
            problems.append(f"p{share * 100:.0f} of the recoveries is {found:.1f} s, expected up to {limit:.0f} s")
    return problems


def fast(throughput, least):
    """Steps per second as a share of the undisturbed run's."""
    return (
        [f"the throughput is {throughput:.2f} of the undisturbed run's, expected {least}"] if throughput < least else []
    )


def percentile(values, share):
    """By the nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _short(what):
    text = str(what)
    return text if len(text) < 300 else f"{text[:300]} …"
