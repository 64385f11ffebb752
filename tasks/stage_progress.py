"""The progress of training, evaluations, conversions, copies and other long work, as text and as a share of the
work.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from engine.config import Config
from engine.data.hub import Download
from engine.orchestrator.evaluation_progress import EvaluationProgress
from engine.run.checkpoint_files import partial_of
from engine.run.folder import RunFolder
from engine.tools.conversion_progress import PROGRESS
from engine.types import JsonObject
from tasks.console import duration
from tasks.progress_display import StageProgress

YOUNG_S = 30.0
"""An incomplete checkpoint to which nothing was written for this many seconds is not being fetched."""


def training(config: Config) -> Callable[[], StageProgress | None]:
    """Reads the progress of the training from the file that the orchestrator writes."""
    folder = RunFolder(config.folder)
    seen: list[bool] = []

    def look() -> StageProgress | None:
        found = _read(folder.progress)
        if found is None:
            ends = seen and not folder.progress.exists()
            return StageProgress("the orchestrator ends its processes" if ends else "starting the orchestrator")
        seen.append(True)
        if not found["ready"] and (size := _arriving(folder.checkpoints)):
            return StageProgress(f"fetching a checkpoint: {mib(size)} so far")
        return _of_step(found, config.train.steps)

    return look


def evaluation(progress: EvaluationProgress, instances: int) -> Callable[[], StageProgress | None]:
    """Reads the progress of an evaluation in this process. `instances`: the number of instances that it starts."""

    def look() -> StageProgress:
        if not progress.expected:
            return StageProgress(f"starting {instances} {'instance' if instances == 1 else 'instances'}")
        if progress.landed == progress.expected == progress.scored:
            return StageProgress(f"{progress.landed:,} responses are scored; votes and intervals", 1.0)
        text = f"{progress.landed:,} of {progress.expected:,} responses"
        if progress.scored:
            kind = "accuracy" if progress.whole_scores else "mean reward"
            text += f", {kind} of these {progress.score / progress.scored:.3f}"
        return StageProgress(text, progress.landed / progress.expected)

    return look


def copied(what: str, done: Callable[[], int], size: int) -> Callable[[], StageProgress | None]:
    """The progress of a copy of `size` bytes. `done` returns the number of bytes copied so far."""

    def look() -> StageProgress:
        share = min(1.0, done() / size) if size else None
        return StageProgress(f"{what}: {mib(done())} of {mib(size)}", share)

    return look


def fetched(what: str, folder: Path) -> Callable[[], StageProgress | None]:
    """The progress of a download of unknown size into a folder."""
    return lambda: StageProgress(f"{what}: {mib(size_of(folder))} so far")


def downloaded(what: str, download: Download) -> Callable[[], StageProgress | None]:
    """The progress of a download from the Hugging Face hub."""

    def look() -> StageProgress:
        if not download.total:
            return StageProgress(f"{what}: asking the Hugging Face hub")
        return StageProgress(
            f"{what}: {mib(download.done)} of {mib(download.total)}", min(1.0, download.done / download.total)
        )

    return look


def since_now(what: str) -> Callable[[], StageProgress | None]:
    """The progress of work of unknown size: the time it has taken so far."""
    began = time.monotonic()
    return lambda: StageProgress(f"{what}: {duration(time.monotonic() - began)} so far")


def conversion(log: Path) -> Callable[[], StageProgress | None]:
    """Reads the progress of a conversion from the log of `engine.tools.conversion`."""

    def look() -> StageProgress:
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        told = [line for line in lines if line.startswith(PROGRESS)]
        return StageProgress(told[-1].removeprefix(PROGRESS) if told else "loading torch, Megatron and transformers")

    return look


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder and its subfolders. Files that vanish during the count are left out."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size if path.is_file() else 0
    return size


def mib(size: int) -> str:
    """A number of bytes as text."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def _arriving(checkpoints: Path) -> int:
    """Bytes of the checkpoint that is being copied here now; 0 if there is none."""
    pattern = partial_of(checkpoints / "step-*").name
    young = time.time() - YOUNG_S
    return sum(size_of(one) for one in checkpoints.glob(pattern) if _newest(one) > young)


def _newest(folder: Path) -> float:
    times = [0.0]
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times)


def _read(file: Path) -> JsonObject | None:
    try:
        found: JsonObject = json.loads(file.read_bytes())
    except (OSError, ValueError):  # not written yet, or removed at the end
        return None
    return found


def _of_step(found: JsonObject, steps: int) -> StageProgress:
    if not found["ready"]:
        waits = "starting"
        if "met" in found:
            of = f" of {found['instances']} instances answer" if found["instances"] else " instances have joined"
            waits = f"{found['met']}{of}"
        return StageProgress(f"loading the models; {waits}", None)
    if "step" not in found and found.get("done") == steps:
        return StageProgress("the last checkpoint and the policy are written", 1.0)
    if "step" not in found:
        none = found.get("met") == 0
        return StageProgress("waiting for an instance" if none else "weights are on their way to the instances", None)
    step = found["step"]
    expected = found["expected"]
    text = f"{step}/{steps} steps; in the next: {found['trained']} of {expected} groups trained"
    if not found["arrived"]:
        text = (
            f"{step}/{steps} steps; in the next: waiting for the first of {expected} groups; "
            f"{found.get('running', 0)} responses run, {found.get('tokens_per_s', 0):,} tokens/s"
        )
    elif found["trained"] < found["arrived"] or found["arrived"] < expected:
        text += f", {found['arrived']} sampled"
    if (under_way := found.get("evaluation")) is not None:
        text += (
            f"; evaluating version {under_way['version']}: {under_way['landed']:,} of {under_way['expected']:,} "
            "responses"
        )
    return StageProgress(text, (step + found["trained"] / expected) / steps)
