"""The folder of a run: created once, appended to line by line, and truncated on resume."""

from __future__ import annotations

import contextlib
import json
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby, islice
from pathlib import Path

import tomli_w

from engine.config import Config
from engine.config.recipe import load_config
from engine.errors import BadInput, MetronomeError, clean_line
from engine.run.event_stream import EventWriter
from engine.run.files import append_line, read_json, read_lines, write_atomically
from engine.run.logs import log_error, log_line
from engine.run.run_file import Fence
from engine.run.trace import KEPT_STEPS
from engine.types import Group, JsonObject, Response, StepReport

CONFIG = "config.toml"
"""Name of the file with the whole configuration of a run."""
LAST_TABLE = "tracking"
"""The last table of a resolved config."""
RESERVE = 64 * 1024
"""Bytes reserved in the run folder, so that the reason of a failure can be written even when the disk is full."""

SAMPLED_GROUPS = 2
"""Number of groups per step whose prompts, responses and scores are kept for people to read."""
SAMPLED_TOKENS = 2048
"""Number of first tokens of such a response that are kept one by one."""


class RunFolder:
    """`<run.output>/<run.name>/` and the paths of the files in it."""

    def __init__(self, path: Path, events: EventWriter | None = None) -> None:
        """`events`: also gets the steps and notices that are written through this object."""
        self.path = path
        self.config = path / CONFIG
        self.steps = path / "steps.jsonl"
        self.evaluations = path / "evaluations.jsonl"
        self.responses = path / "responses"
        self.trace = path / "trace"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.policy = path / "policy"
        self.failure = path / "failure.json"
        self.lock = path / "lock"
        self.progress = self.logs / "progress.json"
        """What the run does now, for `watch` and `status`. During a training it is written twice a second, also if it
        is the same, so it is the sign of life, too."""
        self.notices = self.logs / "notices.jsonl"
        """Lines for the run's user (engine.orchestrator.run_events): stage, text, at."""
        self.fence = Fence(path)
        """The right to write of the process that writes through this object."""
        self.events = events or EventWriter()
        self._reserve = path / ".reserve"
        self._ended: dict[Path, float] = {}
        """Newest time of a line, by file of lines."""

    def create(self, config: Config, resume: bool) -> None:
        """Create the folder and write the resolved config. Raises BadInput if the folder has steps and `resume` is
        False."""
        if self.steps.exists() and not resume:
            raise BadInput(
                f"run folder {self.path} already has a run; give --resume to continue it, or another run.name"
            )
        for folder in (self.logs, self.responses):
            folder.mkdir(parents=True, exist_ok=True)
        if not self.config.exists():
            self._keep_private()
        self.failure.unlink(missing_ok=True)
        write_atomically(self._reserve, "." * RESERVE)
        dump_config(config, self.config)

    def _keep_private(self) -> None:
        """Close a new folder to other users: it holds responses, logs and, while the run goes on, its access token."""
        with contextlib.suppress(PermissionError):  # a folder that someone else made for us
            self.path.chmod(0o700)

    def read_config(self) -> Config:
        """The resolved config of the run. Raises BadInput if it cannot be read, or if only its end is missing."""
        text = self.config.read_text(errors="replace")
        if not text.endswith("\n") or f"[{LAST_TABLE}]" not in text:
            raise BadInput(
                f"{self.config}: the file is damaged, its end is missing; restore the run's config there (MLflow has "
                "it as an artifact), or delete the file and resume with the recipe and the settings of the run's start"
            )
        return load_config(self.config)

    def cut_steps(self, step: int) -> None:
        """Remove everything about steps from `step` on, because these steps are trained again."""
        self.fence.check_attempt()
        if self.steps.exists():
            self._ended[self.steps] = _newest(self.steps)  # a step that is redone ends later than before
            kept = [line for line in read_lines(self.steps) if line["step"] < step]
            write_atomically(self.steps, "".join(json.dumps(line) + "\n" for line in kept))
        for found, sample in self.all_samples():
            if found >= step:
                sample.unlink()

    def all_samples(self) -> list[tuple[int, Path]]:
        """Each step with response samples, and its file."""
        found = ((int(path.stem.removeprefix("step-")), path) for path in self.responses.glob("step-*.jsonl"))
        return sorted(found)

    def add_step(self, report: StepReport) -> None:
        """Append one line to steps.jsonl, in one write, with its time (`ended_s`). Raises TakenOver if another
        orchestrator writes the run."""
        self.fence.check_attempt()
        line = asdict(report)
        line |= line.pop("reward_metrics") or {}
        line = {key: value for key, value in line.items() if value is not None}
        line["ended_s"] = self._end_time(self.steps)
        append_line(self.steps, line)
        self.events.send("step", line)

    def add_evaluation(self, row: JsonObject) -> JsonObject:
        """Append one line to evaluations.jsonl, with its time (`ended_s`); returns the line. Raises TakenOver as
        `add_step` does."""
        self.fence.check_attempt()
        line = {**row, "ended_s": self._end_time(self.evaluations)}
        append_line(self.evaluations, line)
        return line

    def _end_time(self, file: Path) -> float:
        """The time of a line that is appended to a file now: seconds since 1970 in whole milliseconds, and more than
        in all lines before it, even if the clock was set back. Trackers tell the lines apart by it."""
        before = self._ended[file] if file in self._ended else _newest(file)
        self._ended[file] = round(max(time.time(), before + 0.001), 3)
        return self._ended[file]

    def add_notice(self, stage: str, text: str) -> None:
        """Append one line to the notices, unless a newer orchestrator writes the run. A file that can't be written is
        told in the log."""
        if self.fence.is_passed:
            return
        text = clean_line(text)
        self.events.send("notice", [stage, text])
        try:
            append_line(self.notices, {"stage": stage, "text": text, "at": time.time()})
        except OSError as error:
            log_line(f"{self.notices} can't be written: {error}")

    def samples_of(self, step: int) -> Path:
        """The file with the response samples of a step."""
        return self.responses / f"step-{step:06d}.jsonl"

    def add_samples(
        self,
        step: int,
        groups: Sequence[Group],
        keep_steps: int = KEPT_STEPS,
        decode: Callable[[Sequence[int]], str] | None = None,
        pieces: Callable[[Sequence[int]], list[str]] | None = None,
        advantages: Mapping[int, Mapping[int, float]] | None = None,
    ) -> None:
        """Write the first `SAMPLED_GROUPS` groups of a step, one JSON object per response, and delete the file that is
        now older than the newest `keep_steps`. `decode`: gives the texts of a conversation's parts;
        `pieces`: the text of each token; `advantages`: by the index of a group and a response's number in it. Raises
        TakenOver."""
        self.fence.check_attempt()
        rows = [
            {
                "step": step,
                "prompt_id": group.prompt.id,
                "problem": group.prompt.problem,
                "answer": group.prompt.answer,
                "response": response.text,
                **({} if decode is None or all(response.loss_mask) else {"turns": _turns(response, decode)}),
                "finish_reason": response.finish_reason,
                "score": score.value,
                "status": score.status,
                "detail": score.detail,
                **(
                    {}
                    if (value := (advantages or {}).get(group.index, {}).get(number)) is None
                    else {"advantage": value}
                ),
                **({} if pieces is None else {"tokens": _tokens(response, pieces)}),
                **{f"reward/{name}": value for name, value in score.metrics.items()},
            }
            for group in groups[:SAMPLED_GROUPS]
            for number, (response, score) in enumerate(zip(group.responses, group.scores, strict=True))
        ]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomically(self.samples_of(step), text)
        if keep_steps <= step:
            self.samples_of(step - keep_steps).unlink(missing_ok=True)

    def first_figures(self, key: str, most: int = 1) -> list[float]:
        """The values of a figure in the first steps that have it, at most this many."""
        rows = read_lines(self.steps) if self.steps.exists() else ()
        return list(islice((row[key] for row in rows if key in row), most))

    def write_failure(self, error: Exception) -> None:
        """Write the reason of a failure to failure.json, for the process that started the run. Does nothing if another
        orchestrator writes the run now.

        On a full disk, the reserve makes room. If that is not enough, the reason is only printed.
        """
        if self.fence.is_passed:
            return
        text = json.dumps({"error": type(error).__name__, "message": str(error)})
        try:
            write_atomically(self.failure, text)
        except OSError:
            self._reserve.unlink(missing_ok=True)
            try:
                write_atomically(self.failure, text)
            except OSError as full:
                log_error(f"{self.failure} can't be written: {full}")

    def last_failure(self) -> tuple[str, str] | None:
        """Name and message of the error that ended the run, as `write_failure` wrote them; None if none was written."""
        if not self.failure.exists():
            return None
        try:
            told = read_json(self.failure, "why the run ended", "see the logs")
            return str(told["error"]), str(told["message"])
        except (BadInput, KeyError) as error:
            return MetronomeError.__name__, str(error)


def _newest(file: Path) -> float:
    return max((row.get("ended_s", 0.0) for row in read_lines(file)), default=0.0)


def dump_config(config: Config, path: Path) -> None:
    """Write the resolved config as TOML, atomically. `load_config(path)` gives an equal config."""
    write_atomically(path, tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))


def _tokens(response: Response, pieces: Callable[[Sequence[int]], list[str]]) -> JsonObject:
    """The first tokens of a response: their texts and log-probabilities, and (first token, value) of each run of tokens
    that are trained or not, and that one weight version sampled."""
    shown = slice(0, SAMPLED_TOKENS)
    own = [bool(value) for value in response.loss_mask[shown]]
    return {
        "count": len(response.token_ids),
        "texts": pieces(response.token_ids[shown]),
        "logprobs": [round(value, 4) for value in response.logprobs[shown]],
        "trained": [[at, int(value)] for at, value in enumerate(own) if at == 0 or own[at - 1] != value],
        "versions": [list(run) for run in response.versions],
    }


def _turns(response: Response, decode: Callable[[Sequence[int]], str]) -> list[dict[str, object]]:
    """The parts of a conversation. Those of the model are trained, and have the versions of their weights."""
    starts = [start for start, _ in response.versions]
    found: list[dict[str, object]] = []
    for own, part in groupby(range(len(response.token_ids)), key=lambda place: bool(response.loss_mask[place])):
        places = list(part)
        turn = {"role": "model" if own else "environment", "text": decode([response.token_ids[one] for one in places])}
        found.append({**turn, "trained": own, "tokens": len(places)})
        if own:
            numbers = {bisect_right(starts, place) - 1 for place in places}
            found[-1]["versions"] = sorted({response.versions[number][1] for number in numbers if number >= 0})
    return found
