"""Runs the parts of the acceptance one after the other, each in a separate process with a deadline.

A part that fails, crashes or hangs does not stop the later ones. This process never touches a device. pytest could not
take its place: pytest-timeout does not end a call into a driver that holds the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from engine.config.tree import usable_cores
from engine.errors import BadInput
from engine.run.process import Child, python_command, signal_group
from engine.tools.acceptance.notes import SLOWER_START_S, Notes, notes_of
from engine.types import JsonObject

FORMAT = 1
"""Version of the JSON report."""


@dataclass(frozen=True)
class PartResult:
    """The result of one part."""

    part: str
    status: Literal["ok", "failed", "skipped"]
    seconds: float
    lines: tuple[str, ...] = ()
    """Observations, as sentences."""
    figures: JsonObject = field(default_factory=dict)
    reason: str = ""
    """Why it failed or was skipped. Several lines if it includes the end of a log."""
    remedy: str = ""
    """What to do about a failure, or how to make a skipped part run."""


def text(result: PartResult, number: int, count: int) -> str:
    """The section of a part, in Markdown."""
    lines = [f"## {number}/{count} {result.part}: {result.status} ({result.seconds:.0f} s)", ""]
    lines += [f"- {line}" for line in result.lines]
    if result.reason:
        first, *log = result.reason.splitlines()
        lines.append(f"- {result.status}: {first}")
        lines += ["", *(f"      {line.strip()}" for line in log), ""] if log else []
    if result.remedy:
        lines.append(f"- what to do: {result.remedy}")
    return "\n".join(lines) + "\n"


def summary(results: Sequence[PartResult]) -> str:
    """The last section: a table of all parts, and one sentence."""
    rows = [f"| {one.part} | {one.status} | {one.seconds:.0f} s |" for one in results]
    return "\n".join(["## Summary", "", "| part | result | took |", "|---|---|---|", *rows, "", f"{verdict(results)}"])


def verdict(results: Sequence[PartResult]) -> str:
    """One sentence: the number of parts by status, and the seconds."""
    statuses = Counter(one.status for one in results)
    counts = ", ".join(f"{statuses[status]} {status}" for status in ("ok", "failed", "skipped") if statuses[status])
    return f"{counts}, in {sum(one.seconds for one in results):.0f} s."


def healthy(results: Sequence[PartResult]) -> bool:
    """Whether no part has failed."""
    return all(one.status != "failed" for one in results)


def as_json(results: Sequence[PartResult], settings: Sequence[str]) -> JsonObject:
    """The whole report. `settings`: the command's overrides."""
    return {
        "format": FORMAT,
        "healthy": healthy(results),
        "settings": list(settings),
        "seconds": round(sum(one.seconds for one in results), 1),
        "parts": [asdict(one) | {"seconds": round(one.seconds, 1)} for one in results],
    }


TOTAL_S = 600.0
"""Seconds for all parts together if instances start fast. A part that would start later is skipped."""
GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL, and again after SIGKILL. A process that hangs in a driver may outlast both."""
RUN_REMEDY = "read the logs of the run, in its folder logs/; docs/troubleshooting.md goes by message"


@dataclass(frozen=True)
class AcceptancePart:
    """One part of the acceptance."""

    name: str
    deadline_s: float
    remedy: str
    """What to do if it fails."""
    starts: int = 0
    """Number of instances that it starts, one after the other."""

    def slower_s(self, platform: str) -> float:
        """Additional seconds that it may take on this platform, because instances start slowly there."""
        return self.starts * SLOWER_START_S.get(platform, 0.0)


ACCEPTANCE = (
    AcceptancePart("versions", 90.0, "install what the lines name; docs/hardware.md says which versions fit together"),
    AcceptancePart(
        "devices", 60.0, "no other process may use the device (nvidia-smi, npu-smi info); check driver and CUDA or CANN"
    ),
    AcceptancePart("kernels", 240.0, "do not train: report it with this page, the kernel's file is in engine/model"),
    AcceptancePart(
        "broadcast", 90.0, "run again with NCCL_DEBUG=INFO or ASCEND_GLOBAL_LOG_LEVEL=1 and read the log; in a "
        "container give it shared memory (--ipc host)",
    ),
    AcceptancePart("completion", 240.0, "read the instance's log; docs/rollouts.md says how an instance is started", 1),
    AcceptancePart("weight sync", 240.0, RUN_REMEDY, 1),
    AcceptancePart("training step", 180.0, RUN_REMEDY),
    AcceptancePart("sync against periodic", 300.0, RUN_REMEDY, 2),
)  # fmt: skip
"""All parts in order. The first needs the least of the machine."""
LARGE = ("model*", "*/checkpoints", "*/policy")
"""Folders that are removed at the end. Logs, figures and configurations are kept."""
NAMES = tuple(part.name for part in ACCEPTANCE)
Installed = Callable[[], tuple[list[str], bool]]


def check(
    settings: Sequence[str], folder: Path, only: Sequence[str], installed: Installed, say: Callable[[str], None]
) -> list[PartResult]:
    """Run the parts. Pass `say` the section of each part when it has ended, and finally the summary.

    `settings`: overrides of a recipe, for all parts; `folder`: for logs and runs; `only`: names of parts, empty for
    all; `installed`: returns lines on the installed versions, and whether they fit together. Raises BadInput for an
    unknown part.
    """
    if unknown := [name for name in only if name not in NAMES]:
        raise BadInput(f"--only {unknown[0]}: there is no such part, expected one of {', '.join(NAMES)}")
    parts = [part for part in ACCEPTANCE if not only or part.name in only]
    platform = expected_platform(settings)
    total_s = TOTAL_S + sum(part.slower_s(platform) for part in parts)
    began = time.monotonic()
    results: list[PartResult] = []
    for part in parts:
        left = total_s - (time.monotonic() - began)
        part = replace(part, deadline_s=part.deadline_s + part.slower_s(platform))
        command = part_command(part.name, folder, settings)
        result = run_part(part, command, folder, left) if left > 0 else _too_late(part, total_s)
        results.append(_with_versions(result, installed) if part.name == "versions" else result)
        say(text(results[-1], len(results), len(parts)))
    say(summary(results))
    for large in [found for pattern in LARGE for found in folder.glob(pattern)]:
        shutil.rmtree(large)
    return results


def expected_platform(settings: Sequence[str]) -> str:
    """The platform that the parts will choose, as far as can be told without torch: that of the settings, else "npu" if
    torch_npu is installed, else "auto"."""
    given = [one.partition("=")[2].strip(' "') for one in settings if one.startswith("platform.device=")]
    chosen = given[-1] if given else "auto"
    return "npu" if chosen == "auto" and importlib.util.find_spec("torch_npu") else chosen


def part_command(name: str, folder: Path, settings: Sequence[str]) -> list[str]:
    """Command line of a part's process."""
    return python_command("engine.tools.acceptance.part", name, str(folder), *settings)


def run_part(part: AcceptancePart, command: Sequence[str], folder: Path, left_s: float = TOTAL_S) -> PartResult:
    """Run a part to its end, to its own deadline, or to that of all parts, which is `left_s` seconds away."""
    began = time.monotonic()
    deadline_s = min(part.deadline_s, left_s)
    stem = part.name.replace(" ", "-")
    notes_file = notes_of(folder, part.name)
    child = Child(f"part {part.name}", command, folder / f"{stem}.log")
    late = gone = False
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(deadline_s)
        late = child.alive
    finally:
        gone = _end(child)
    notes = Notes.read(notes_file)
    result = PartResult(
        part=part.name,
        status="failed",
        seconds=time.monotonic() - began,
        lines=tuple(notes.lines),
        figures=notes.figures,
        remedy=part.remedy,
    )
    if late:
        hangs = "" if gone else f"process {child.pid} could not be killed: it hangs in the driver; "
        how = f"{_busy()}{hangs}it {child.how_it_ended()}"
        return replace(result, reason=f"not finished after {deadline_s:.0f} s, at: {notes.doing}; {how}")
    if notes.end is None:
        return replace(result, reason=f"crashed, at: {notes.doing}; it {child.how_it_ended()}")
    remedy = notes.end["remedy"] or (part.remedy if notes.end["status"] == "failed" else "")
    return replace(result, **{**notes.end, "remedy": remedy})


def _end(child: Child) -> bool:
    """End the process and everything it started, by force if necessary. Return whether it ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        signal_group(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(GRACE_S)
            return True
    return False


def _busy() -> str:
    """A remark if the machine has more work than cores, because a deadline then means little; otherwise ""."""
    load = os.getloadavg()[0]
    cores = len(usable_cores())
    return f"the machine is busy (load {load:.0f} on {cores} cores); " if load > 2 * cores else ""


def _too_late(part: AcceptancePart, total_s: float) -> PartResult:
    return PartResult(
        part=part.name,
        status="skipped",
        seconds=0.0,
        reason=f"the {total_s / 60:.0f} minutes for all parts are used up",
        remedy=f'metronome doctor --device --only "{part.name}"',
    )


def _with_versions(result: PartResult, installed: Installed) -> PartResult:
    """The part "versions", with the installed versions added, which need no device."""
    began = time.monotonic()
    lines, fits = installed()
    both = replace(result, lines=(*result.lines, *lines), seconds=result.seconds + time.monotonic() - began)
    if fits or result.status == "failed":
        return both
    return replace(both, status="failed", reason="something is missing or does not fit", remedy=ACCEPTANCE[0].remedy)
