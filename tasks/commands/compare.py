"""Compares runs, read from run folders and MLflow, in an HTML page and a table on the console."""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
from mlflow.artifacts import download_artifacts

from engine.config.keys import flatten_keys
from engine.errors import BadInput
from engine.evaluation import tables
from engine.run.files import read_lines
from engine.run.folder import RunFolder
from engine.tools.comparison import page
from engine.tools.comparison.accuracy import benchmark_names
from engine.tools.comparison.run_figures import REWARD, ComparedRun, steps_once
from engine.tools.comparison.verdict import Verdict, judge_evaluations
from engine.types import JsonObject
from tasks.stages.summary import bound_rows
from tasks.terminal.progress_display import fetched, show_progress
from tasks.tracking.mirror import figure_of
from tasks.tracking.store import STORE_ERRORS, first_line

RUN_ID = re.compile(r"[0-9a-f]{32}")
ROWS = "evaluations.jsonl"
EVALUATIONS = "evaluations"
"""Name of the file and of the folder of tables, both in a run folder and among a run's artifacts."""
ENDS = {"FAILED": "MLflow has it as FAILED", "KILLED": "MLflow has it as KILLED"}
"""The text about a failed run, by its status in MLflow."""


def compare_runs(given: Sequence[str], target: Path, uri: str = "") -> str:
    """Write the page that compares each run with the first. Return the text for the console. Where a run has no steps
    (`metronome evaluate`), only the evaluations are compared, without a page.

    given: run folders, their names in runs/, or MLflow run ids. uri: the MLflow store of the run ids; default
    MLFLOW_TRACKING_URI, else runs/mlflow.db. Raises BadInput for fewer than two runs, for a run that is given twice,
    for anything that is not a run, and for evaluations without a benchmark in common.
    """
    if len(given) < 2:
        raise BadInput(f"compare needs at least two runs (run folders or MLflow run ids), not {len(given)}")
    runs = _named_apart([_read(one, uri) for one in given])
    if not all(run.steps for run in runs):
        return _compared_evaluations(runs)
    verdicts = page.write_page(runs, target)
    columns, rows = page.summary_table(runs)
    told = [line for verdict in verdicts for line in ("", *_told(verdict))]
    return "\n".join([align_columns([columns, *rows]), *told, *_bounds(runs), "", f"page: {target}"])


def _compared_evaluations(runs: Sequence[ComparedRun]) -> str:
    columns, rows = page.summary_table(runs)
    found = judge_evaluations(runs)
    if not found:
        evaluated = "; ".join(", ".join(benchmark_names([run])) for run in runs)
        raise BadInput(
            f"{', '.join(run.name for run in runs[1:])} and {runs[0].name} have no benchmark in common: {evaluated}"
        )
    return "\n".join([align_columns([columns, *rows]), "", *found])


def _bounds(runs: Sequence[ComparedRun]) -> list[str]:
    """What the steps of each run were bound by. Runs that are too short, or whose folder is not here, are left out."""
    found = {run.name: bound_rows(Path(run.source)) for run in runs if Path(run.source).is_dir()}
    rows = [[name, *row.values()] for name, row in found.items() if row]
    return ["", "Bound by:", align_columns(rows)] if rows else []


def _told(verdict: Verdict) -> list[str]:
    return [
        verdict.answer,
        *(f"- {one}" for one in verdict.sentences),
        *(f"- Careful: {one}" for one in verdict.cautions),
    ]


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text in aligned columns."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _named_apart(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    twice = [source for source, count in Counter(run.source for run in runs).items() if count > 1]
    if twice:
        raise BadInput(f"{twice[0]} was given twice; compare needs different runs")
    names = Counter(run.name for run in runs)
    return [
        replace(run, name=f"{run.name} #{place}") if names[run.name] > 1 else run
        for place, run in enumerate(runs, start=1)
    ]


def _read(given: str, uri: str) -> ComparedRun:
    there = [path for path in (Path(given), Path("runs") / given) if path.is_dir()]
    if there:  # another folder may have a run's name
        return from_folder(next((path for path in there if _is_run(path)), there[0]))
    if RUN_ID.fullmatch(given):
        return from_mlflow(given, uri)
    raise BadInput(f"{given}: neither a run folder, nor one's name in runs/, nor an MLflow run id (32 hex digits)")


def _is_run(path: Path) -> bool:
    return RunFolder(path).steps.exists() or (path / ROWS).exists()


def from_folder(path: Path) -> ComparedRun:
    """Read a run from its folder. Raises BadInput if it has neither steps nor evaluations."""
    folder = RunFolder(path)
    try:
        steps = steps_once(list(read_lines(folder.steps)))
        config = tomllib.loads(folder.config.read_text()) if folder.config.exists() else {}
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: steps.jsonl or config.toml can't be read: {error}") from None
    rows, means = _with_tables(path)
    if not steps and not rows:
        raise BadInput(f"{path}: no run with steps or evaluations; expected a folder with steps.jsonl or {ROWS}")
    failure = " ".join((folder.last_failure() or ("", ""))[1].split())[:300]
    return ComparedRun(
        name=path.resolve().name,
        source=str(path.resolve()),
        config=_text(flatten_keys(config)),
        steps=steps,
        evaluations=rows,
        tables=means,
        failure=failure,
    )


def from_mlflow(run_id: str, uri: str = "") -> ComparedRun:
    """Read a run from MLflow. Raises BadInput for an unknown id, a store that does not answer, or a run without
    steps.
    """
    store = _store(uri)
    client = mlflow.MlflowClient(store)
    try:
        found = client.get_run(run_id)
        steps = _steps(
            client, run_id, [name for name in found.data.metrics if "/" not in name or name.startswith(REWARD)]
        )
        evaluations, means = _evaluations(client, found, store)
    except STORE_ERRORS as error:
        raise BadInput(f"MLflow run {run_id} can't be read from {store}: {first_line(error)}") from None
    if not steps:
        raise BadInput(f"MLflow run {run_id} in {store} has no steps")
    changed = {
        name.removeprefix("changed."): value for name, value in found.data.tags.items() if name.startswith("changed.")
    }
    source = found.data.tags.get("metronome.run_folder", "") or f"{run_id} in {store}"
    config = _text({**found.data.params, **changed})
    return ComparedRun(
        name=found.info.run_name or run_id[:8],
        source=source,
        config=config,
        steps=steps,
        evaluations=evaluations,
        tables=means,
        failure=ENDS.get(found.info.status, ""),
    )


def _store(uri: str) -> str:
    local = Path("runs/mlflow.db")
    found = uri or os.environ.get("MLFLOW_TRACKING_URI") or (f"sqlite:///{local.resolve()}" if local.is_file() else "")
    if not found:
        raise BadInput("an MLflow run id needs its store: give --tracking-uri, or set MLFLOW_TRACKING_URI")
    if found.startswith("sqlite:///") and not Path(found.removeprefix("sqlite:///")).is_file():
        raise BadInput(f"--tracking-uri {found}: there is no such file")  # MLflow would create an empty one
    return found


def _text(config: JsonObject) -> dict[str, str]:
    """Values as text, as in MLflow. Keys that are not set are left out, as in config.toml."""
    return {key: str(value) for key, value in config.items() if str(value) != "None"}


def _steps(client: mlflow.MlflowClient, run_id: str, names: Sequence[str]) -> list[JsonObject]:
    """Rebuild the lines of steps.jsonl from the histories of the metrics. If a value was logged twice, the later one
    counts."""
    rows: dict[int, JsonObject] = {}
    for name in names:
        for point in sorted(client.get_metric_history(run_id, name), key=lambda point: point.timestamp):
            rows.setdefault(point.step, {"step": point.step})[name] = point.value
    return [rows[step] for step in sorted(rows)]


def _evaluations(
    client: mlflow.MlflowClient,
    run: Any,  # noqa: ANN401
    store: str,
) -> tuple[list[JsonObject], dict[str, dict[str, float]]]:
    """The rows of evaluations.jsonl and their tables, from the artifacts. A run that has not ended has no artifacts;
    its rows come from the metrics."""
    there = {item.path for item in client.list_artifacts(run.info.run_id)}
    if not {ROWS, EVALUATIONS} <= there:
        return _from_metrics(client, run), {}
    with tempfile.TemporaryDirectory(prefix="metronome-compare-") as scratch:
        with show_progress("compare", fetched(f"fetching the evaluations of {run.info.run_name}", Path(scratch))):
            for name in (ROWS, EVALUATIONS):
                download_artifacts(run_id=run.info.run_id, artifact_path=name, dst_path=scratch, tracking_uri=store)
        return _with_tables(Path(scratch))


def _with_tables(folder: Path) -> tuple[list[JsonObject], dict[str, dict[str, float]]]:
    """The rows of a folder's evaluations.jsonl, and for each table (by the row's `table`) prompt id → mean score."""
    rows = list(read_lines(folder / ROWS))
    files = {
        row["table"]: folder / row["table"] for row in rows if "table" in row and (folder / row["table"]).is_file()
    }
    return rows, {name: tables.table_means(file) for name, file in files.items()}


def _from_metrics(client: mlflow.MlflowClient, run: Any) -> list[JsonObject]:  # noqa: ANN401
    """`benchmark/figure` metrics as rows of evaluations.jsonl. Their step is the weight version."""
    named = {name: figure_of(name) for name in run.data.metrics}
    rows: list[JsonObject] = []
    for benchmark in dict.fromkeys(part for part, figure in named.values() if figure == "avg_at_k"):
        for row in _steps(client, run.info.run_id, [name for name, (part, _) in named.items() if part == benchmark]):
            figures = {named[name][1]: value for name, value in row.items() if name != "step"}
            rows.append({"step": row["step"], "benchmark": benchmark, "weight_version": row["step"], **figures})
    return rows
