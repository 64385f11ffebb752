"""What an operator asks of runs: the newest ones, one's state, its logs; from run folders and the Prefect server."""

from __future__ import annotations

import http.client
import os
import re
import shlex
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from textwrap import shorten

from engine.errors import BadInput, clean_line, counted
from engine.evaluation.tables import rows_of
from engine.run.files import read_lines
from engine.run.folder import RunFolder
from engine.run.lock import is_held
from engine.run.run_file import read_run
from engine.run.run_status import RunStatus, read_status
from engine.run.s3 import SCHEME
from engine.types import JsonObject
from tasks.attempt import registered_policy
from tasks.cluster.prefect_api import post_json
from tasks.terminal.console import REFUSED, format_duration, own_program, print_error, print_page
from tasks.tracking.evaluation_texts import describe_evaluation

FLOW_RUNS = 100
"""Number of newest flow runs that the server is asked for."""
REASON_LENGTH = 120
"""Characters of a reason in the list of runs; `status` has all of it."""
_ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
"""Types of a flow run's states after which the run's folder says more."""
_TIME = re.compile(r"^.{,30}?(?:(\d{4})-)?(\d\d-\d\d)[ T](\d\d:\d\d:\d\d(?:\.\d+)?)")
"""The time of a log's line, as Metronome or vLLM (without the year) writes it."""
_PREFECTS = re.compile(r"^Flow run encountered an exception: \w+: ")
"""What Prefect writes before an error's text."""
_FLOW_NAME = re.compile(r"^(?:evaluation of )?(.*?)(?: \(try \d+\))?$")


def find_folder(run: str, output: Path) -> RunFolder:
    """The folder of a run: its path, its name in `output` or the name of its flow run; "" is the newest run. Raises
    BadInput."""
    if not run:
        folders = _folders(output)
        if not folders:
            raise BadInput(f"{output} has no run; name the folder of runs by --output")
        return folders[0]
    if run.startswith(SCHEME):
        raise BadInput(f"{run}: runs are not read from S3; copy the run folder (aws s3 sync), and name the copy")
    name = _FLOW_NAME.sub(r"\1", run)
    for path in (Path(run), output / name):
        if (path / "config.toml").is_file():
            return RunFolder(path)
    if run.endswith(REFUSED):
        raise BadInput(f"{run}: it was refused before it had a folder, so it has no logs; metronome runs says why")
    raise BadInput(f"{run}: no such run in {output}; metronome runs lists them")


def list_rows(output: Path, count: int) -> list[list[str]]:
    """The newest runs as rows of a table, the newest first. Runs that have not reached a folder come before them.
    Raises BadInput without the folder."""
    if not output.is_dir():
        raise BadInput(f"--output {output}: no such folder")
    folders = _folders(output)
    states = _flow_states()
    known = {folder.path.name for folder in folders}
    waiting = [
        [row["name"], row["state_name"], "", "", "", "", "", "", _short((row["state"] or {}).get("message") or "")]
        for row in states.values()
        if _FLOW_NAME.sub(r"\1", row["name"]) not in known and row["state_name"] not in ("Scheduled", "Completed")
    ]
    head = ["run", "state", "steps", "accuracy", "champion", "resumed", "device-hours", "where", "reason"]
    return [head, *waiting[:count], *(_row(folder, states) for folder in folders[:count])]


def status_rows(folder: RunFolder) -> dict[str, str]:
    """The state of a run as rows of a table."""
    config = folder.read_config()
    steps = list(read_lines(folder.steps))
    run = read_run(folder.path)
    status = read_status(folder, steps, config.train.steps)
    resumed = run.resumes
    rows = {
        "run": str(folder.path),
        "state": _state(folder, status, _flow_states()),
        "why": status.reason,
        "resume": status.resume,
        "finished stages": ", ".join(run.stages) or "none",
        "steps": f"{status.done} of {config.train.steps}" if run.attempts or steps else "",
        "now": status.progress.text if status.progress is not None else "",
        "time left": format_duration(status.left_s) if status.left_s is not None else "",
        "evaluation": _accuracy(folder, describe=True),
        "registered": made.verdict if (made := registered_policy(folder)) is not None else "",
        "resumed": f"{counted(len(resumed), 'time')}, last after: {resumed[-1].why}" if resumed else "",
        "logs": shlex.join([own_program("metronome"), "logs", str(folder.path)]),
    }
    return {name: text for name, text in rows.items() if text}


def show_logs(folder: RunFolder, process: str, lines: int, follow: bool) -> None:
    """Print the last lines of each of the logs of a run's processes, ordered by time, each after the name of its
    process; at the end, why the run failed or stopped. `follow`: then print new lines until the run has ended. Raises
    BadInput for an unknown process."""
    positions: dict[Path, int] = {}
    last = -lines
    while True:
        ended = not is_held(folder.lock)
        found: list[tuple[str, str]] = []
        for file in _logs(folder, process):
            size = file.stat().st_size
            start = positions.get(file, 0)
            start = start if start <= size else 0  # it was moved aside
            with file.open("rb") as opened:
                opened.seek(start)
                whole = opened.read().rpartition(b"\n")[0]
            positions[file] = start + len(whole) + 1 if whole else start
            found += _timed_lines(file, whole.decode(errors="replace").splitlines()[last:])
        for _, line in sorted(found, key=lambda one: one[0]):
            print_page(line)
        if ended and (told := folder.last_failure()) is not None:
            stopped = told[0] == "Stopped"
            print_page(f"{'it stopped' if stopped else 'it failed':<14} {told[1] if stopped else ': '.join(told)}")
        if ended or not follow:
            return
        last = 0
        time.sleep(0.5)


def _logs(folder: RunFolder, process: str) -> list[Path]:
    logs = sorted(folder.logs.glob("*.log"), key=lambda file: file.stat().st_mtime)
    if process and process not in [file.stem for file in logs]:
        names = ", ".join(sorted(file.stem for file in logs)) or "none yet"
        raise BadInput(f"--process {process}: no such log in {folder.logs}; there are {names}")
    return [file for file in logs if process in ("", file.stem)]


def _timed_lines(file: Path, lines: Sequence[str]) -> list[tuple[str, str]]:
    """(time, text) of each line of a log. A line without a time has that of the line before it; lines before the first
    time have that one; a log without any has the time of its last change."""
    changed = datetime.fromtimestamp(file.stat().st_mtime).isoformat(" ")
    found = map(_TIME.search, lines)
    times = [f"{one[1] or changed[:4]}-{one[2]} {one[3]}" if one else "" for one in found]
    now = next(filter(None, times), changed)
    made = []
    for at, line in zip(times, lines, strict=True):
        now = at or now
        made.append((now, f"{file.stem:<14} {line}"))
    return made


def _folders(output: Path) -> list[RunFolder]:
    """The run folders in a folder, the newest first."""
    configs = sorted(output.glob("*/config.toml"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [RunFolder(file.parent) for file in configs]


def _row(folder: RunFolder, states: dict[str, JsonObject]) -> list[str]:
    try:
        steps = list(read_lines(folder.steps))
        made = registered_policy(folder)
        of = folder.read_config().train.steps
    except BadInput as error:  # the other runs are shown all the same
        return [folder.path.name, "Damaged", "", "", "", "", "", str(folder.path), clean_line(str(error))]
    run = read_run(folder.path)
    status = read_status(folder, steps, of)
    return [
        folder.path.name,
        _state(folder, status, states),
        f"{status.done}/{of}" if run.attempts or steps else "",
        _accuracy(folder),
        shorten(made.verdict, 60, placeholder=" …") if made is not None else "",
        str(len(run.resumes)),
        f"{device_hours(steps):.2f}",
        str(folder.path),
        _short(status.reason),
    ]


def _short(reason: str) -> str:
    return shorten(_PREFECTS.sub("", clean_line(reason)), REASON_LENGTH, placeholder=" …")


def device_hours(steps: Sequence[JsonObject]) -> float:
    """Hours times devices that the steps took (lines of steps.jsonl)."""
    rates = ((row["trained_tokens"], row["tokens_per_s_per_device"]) for row in steps)
    return sum(tokens / rate for tokens, rate in rates if rate) / 3600


def _accuracy(folder: RunFolder, describe: bool = False) -> str:
    """Of the last evaluation, with its interval."""
    if not (rows := rows_of(folder)):
        return ""
    last = rows[-1]
    if describe:
        return describe_evaluation(last)
    return f"{last['avg_at_k']:.3f} [{last['ci_low']:.3f}, {last['ci_high']:.3f}]"


def _state(folder: RunFolder, status: RunStatus, states: dict[str, JsonObject]) -> str:
    """The state of the run's flow on the server while the flow goes on or waits, else what its folder shows."""
    flow = states.get(read_run(folder.path).flow_run)
    if flow is not None and flow["state_type"] not in _ENDED:
        return str(flow["state_name"])
    return status.word.capitalize()


def _flow_states() -> dict[str, JsonObject]:
    """The newest flow runs by id; none without PREFECT_API_URL, or if the server does not answer."""
    if not (url := os.environ.get("PREFECT_API_URL")):
        return {}
    wanted = {
        "flow_runs": {"tags": {"all_": ["metronome"]}},
        "sort": "EXPECTED_START_TIME_DESC",
        "limit": FLOW_RUNS,
    }
    try:
        return {row["id"]: row for row in post_json(f"{url}/flow_runs/filter", wanted)}
    except (OSError, http.client.HTTPException, ValueError) as error:  # also no HTTP, or a proxy's page
        print_error(f"warning: the Prefect server {url} does not answer, so states are those of the folders: {error}")
        return {}
