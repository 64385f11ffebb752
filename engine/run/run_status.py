"""How a run is, read from its folder: one answer for `status`, `runs`, `watch`, the page and what Prefect shows."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from engine.run.divergence import find_divergence, spoilt_checkpoints
from engine.run.files import read_lines
from engine.run.folder import RunFolder
from engine.run.lock import is_held
from engine.run.logs import last_message
from engine.run.progress import Progress, read_progress
from engine.run.run_file import RunFile, read_run
from engine.types import JsonObject

LAST_STAGE = "announce"
"""The stage of a flow after which its run is finished."""
BEAT_S = 30.0
"""A training whose progress was written within so many seconds goes on, also on another machine."""
RECENT = 20
"""Number of steps whose mean time predicts the time left."""

Word = Literal["starting", "running", "ending", "finished", "evaluated", "stopped", "failed", "died"]
"""The first three: it goes on. "evaluated": nothing is trained there."""


@dataclass(frozen=True)
class RunStatus:
    """How a run is."""

    word: Word
    done: int = 0
    """Number of finished steps."""
    error: str = ""
    """Name of the error that ended it; "" if none was told."""
    reason: str = ""
    """Why it ended; "" for one that goes on or is complete."""
    resume: str = ""
    """The command that continues it; "" if there is nothing to continue."""
    progress: Progress | None = None
    """What it does now; None if it has ended or tells nothing."""
    left_s: float | None = None
    """Seconds that the other steps take; None if it has ended, or if that is not known."""

    @property
    def goes_on(self) -> bool:
        """Whether a process works on it."""
        return self.word in ("starting", "running", "ending")


def read_status(folder: RunFolder, steps: Sequence[JsonObject], total: int, over: bool = False) -> RunStatus:
    """How the run of a folder is. `steps`: lines of its steps.jsonl; `total`: train.steps; `over`: the run has ended,
    though this process still holds its lock. Raises BadInput for a damaged run.json."""
    run = read_run(folder.path)
    told = folder.last_failure()
    done = steps[-1]["step"] + 1 if steps else 0
    if not over and (is_held(folder.lock) or (told is None and _beats(folder))):
        if told is not None:
            return RunStatus("ending", done, *told)
        now = read_progress(folder.progress)
        works = bool(steps or run.stages) or (now is not None and now.share is not None)
        left = time_left(steps, total) if 0 < done < total else None
        return RunStatus("running" if works else "starting", done, progress=now, left_s=left)
    if told is None and (complete := _completed(folder, run, done, total)):
        return RunStatus(complete, done)
    error, reason = why_ended(folder)
    word: Word = "died" if told is None else "stopped" if error == "Stopped" else "failed"
    return RunStatus(word, done, error, reason, resume_command(folder) if run.attempts else "")


def time_left(steps: Sequence[Mapping[str, Any]], total: int) -> float:
    """Seconds that the rest of `total` steps takes, after these lines of steps.jsonl."""
    return (total - 1 - steps[-1]["step"]) * fmean(row["step_s"] for row in steps[-RECENT:])


def why_ended(folder: RunFolder) -> tuple[str, str]:
    """Name ("" if unknown) and message of what ended the run's last attempt, as far as is known."""
    if (told := folder.last_failure()) is not None:
        return told
    log = folder.logs / "orchestrator.log"
    if said := last_message(log, "error: ") if log.exists() else "":
        return "", said.removeprefix("error: ")
    return "", "its process died without a message (killed, out of memory, or its node was lost)"


def resume_command(folder: RunFolder, command: str = "") -> str:
    """The command that continues a run, from any folder. `command`: run or train; "": the one that the run began
    with. A diverged one continues from before that, at a tenth of its learning rate."""
    command = command or ("run" if read_run(folder.path).flow_run else "train")
    path = folder.path.absolute()
    sets = [f"run.name={path.name}", f"run.output={path.parent}"]
    found = find_divergence(read_lines(folder.steps))
    sets += [f"train.learning_rate={found.rate / 10:g}"] if found.step is not None else []
    program = Path(sys.executable).with_name("metronome")
    spoilt = [str(one.absolute()) for one in spoilt_checkpoints(folder)]
    first = f"{shlex.join(['rm', '-r', *spoilt])} && " if spoilt else ""
    return first + shlex.join([str(program), command, "--resume", *(part for one in sets for part in ("--set", one))])


def _completed(folder: RunFolder, run: RunFile, done: int, total: int) -> Word | None:
    if not run.attempts and not done:  # each training is an attempt, an evaluation is none
        return "evaluated" if folder.evaluations.exists() else None
    if done and done < total:
        return None
    complete = LAST_STAGE in run.stages if run.flow_run else folder.policy.is_dir()
    return "finished" if complete else None


def _beats(folder: RunFolder) -> bool:
    return folder.progress.exists() and time.time() - folder.progress.stat().st_mtime < BEAT_S
