"""Mirrors a run folder in an MLflow run: a single writer makes passes, each of which sends what MLflow may lack.

The timestamp of a figure is its line's `ended_s`. MLflow's databases keep a figure of the same name, step, time and
value once, however often it is sent. So each line's figures are there exactly once after any kill, outage or resume,
and a step that was trained again has the figures of both attempts. Only samples of the machine's load are not in the
folder; they wait in memory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlflow
from mlflow.data.dataset_source import DatasetSource
from mlflow.data.dataset_source_registry import resolve_dataset_source
from mlflow.data.huggingface_dataset_source import HuggingFaceDatasetSource
from mlflow.data.meta_dataset import MetaDataset
from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelInput, Metric, Param, Run, RunTag
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from engine.config import Config
from engine.config.keys import flatten_keys
from engine.data.hub import HubDataset, dataset_of, is_hub_id
from engine.data.named_models import model_name
from engine.data.problem_statistics import REPORT, read_report
from engine.errors import BadInput, clean_text, without_password
from engine.evaluation.tables import EvaluationRow, rows_of
from engine.model.shape import content_hash
from engine.reward.scorer import LONGEST_NAME
from engine.run.files import GrowingLines
from engine.run.run_file import read_run
from engine.types import JsonObject
from tasks.attempt import registered_policy, run_folder
from tasks.terminal.console import print_error
from tasks.tracking import descriptions
from tasks.tracking.store import STORE_ERRORS, first_line, is_refused, retry_conflicts


def metric_values(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a row by metric name, without `step` and `ended_s`, which say where a figure belongs.

    A list of numbers gives NAME_min, NAME_max and NAME_count; a table of numbers gives NAME/KEY; true is 1. Text is
    left out.
    """
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, int | float) and name not in ("step", "ended_s"):
            found[name] = float(value)
        elif isinstance(value, list | tuple) and all(isinstance(item, int | float) for item in value):
            found[f"{name}_count"] = float(len(value))
            found |= {f"{name}_{bound.__name__}": float(bound(value)) for bound in (min, max) if value}
        elif isinstance(value, Mapping):
            found |= {f"{name}/{metric_name(str(key))}": figure for key, figure in metric_values(value).items()}
    return found


SAME_AT_ONE = (
    *("pass_at_k", "pass_ci_low", "pass_ci_high", "maj_at_k", "maj_ci_low", "maj_ci_high", "pass_curve"),
    *("best_at_k_bootstrap", "maj_at_k_bootstrap"),
)
"""Figures of an evaluation that repeat avg@k and its interval if each problem has one response."""


NOT_BENCHMARKS = ("reward", "system")
"""What is before the / in metrics of the steps and of the machine."""
NO_FIGURES = ("weight_version", "protocol", "skipped")
"""Numbers of an evaluation that are not logged as figures. The metrics' step is already the weight version."""


def evaluation_figures(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a line of evaluations.jsonl, without repetitions. Those that depend on k have it in their names:
    `benchmark/avg_at_8`, `benchmark/avg_at_8_ci_low`, `benchmark/pass_at_8`, so that no curve mixes two."""
    left_out = (*NO_FIGURES, *(SAME_AT_ONE if row.get("samples") == 1 else ()))
    figures = metric_values({name: value for name, value in row.items() if name not in left_out})
    return {figure_name(row, name): value for name, value in figures.items()}


def figure_name(row: Mapping[str, Any], name: str) -> str:
    """The metric's name of a figure of a line of evaluations.jsonl. What is before its first / is none of
    `NOT_BENCHMARKS`."""
    own = re.sub(r"^(pass_|maj_)?(?=ci_(low|high)$)", lambda found: f"{found[1] or 'avg_'}at_k_", name)
    own = re.sub(r"^(avg|pass|maj|best)_at_k", rf"\1_at_{row['samples']}", own)
    benchmark = row["benchmark"]
    return f"{metric_name(f'{benchmark}/' if benchmark in NOT_BENCHMARKS else benchmark)}/{own}"


def figure_of(metric: str) -> tuple[str, str]:
    """The benchmark's part and the figure of a metric that `figure_name` has named; two empty texts for any other."""
    benchmark, _, figure = metric.partition("/")
    if not figure or benchmark in NOT_BENCHMARKS:
        return "", ""
    own = re.sub(r"^(avg|pass|maj|best)_at_\d+", r"\1_at_k", figure)
    return benchmark, re.sub(r"^(?:avg_|(pass_|maj_))at_k_(?=ci_)", r"\1", own)


def metric_name(text: str) -> str:
    """The text with `_` in place of each character that MLflow does not accept in the name of a metric or model."""
    return clean_name(text, r"[^\w.\- ]", "_")


def clean_name(text: str, pattern: str, filler: str) -> str:
    """The text with `filler` in place of each match of `pattern`, cut to `LONGEST_NAME`. A changed text ends with six
    digits of its hash, so that two texts never share a name, and with it one history."""
    found = re.sub(pattern, filler, text)[:LONGEST_NAME]
    return found if found == text else f"{found}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


DIGEST = 32
"""Number of hex digits of a version in MLflow's digest (MLflow accepts up to 36)."""
NAME_LIMIT = 500
"""MLflow's limit for the name of a data set, in characters."""


def log_datasets(client: mlflow.MlflowClient, run_id: str, found: Mapping[str, Any]) -> None:
    """Log a report of `problem_statistics.report_data` (data.json) in the contexts "training" and "evaluation".

    A report of several sets is several data sets in MLflow. The digest is the version, which is a hash of the rows of
    all sets of the context. The full hashes and the counts, of all sets too, are tags.
    """
    entries = []
    for figures, context in ((found["train"], "training"), (found["heldout"], "evaluation")):
        tags = {"version": figures["version"], "content_hash": figures["content_hash"], "rows": str(figures["rows"])}
        labels = [InputTag(key, value) for key, value in {"mlflow.data.context": context, **tags}.items()]
        for source, name in _named_sources(figures["source"]):
            dataset = MetaDataset(_source(source), name=name, digest=figures["version"][:DIGEST])
            entries.append(DatasetInput(Dataset(**dataset.to_dict()), labels))
    client.log_inputs(run_id, datasets=entries)


def log_base_model(client: mlflow.MlflowClient, run: Run, path: Path) -> None:
    """Log the base model, once per experiment, as an external model with path and content hash. Reads the model's
    files."""
    digest = content_hash(path)
    experiment = run.info.experiment_id
    known = client.search_logged_models([experiment], filter_string=f"tags.content_hash = '{digest}'", max_results=1)
    model = (
        known[0]
        if known
        else mlflow.create_external_model(
            metric_name(model_name(path)).replace(".", "_"),
            source_run_id=run.info.run_id,
            model_type="base",
            experiment_id=experiment,
            params={"path": str(path), "content_hash": digest},
            tags={"content_hash": digest},
        )
    )
    client.log_inputs(run.info.run_id, models=[LoggedModelInput(model.model_id)])


def _named_sources(source: str) -> list[tuple[str, str]]:
    """(source, name) of each set that a report's `source` names, both with the note of a share that is held out. Sets
    whose files are called alike have their paths as names, because MLflow keeps one of those with a name."""
    named, held_out, share = source.partition(" (held out")
    found = [one + held_out + share for one in ([named] if os.path.exists(named) else named.split(", "))]
    names = [_name(one) for one in found]
    whole = [name if names.count(name) == 1 else one[-NAME_LIMIT:] for one, name in zip(found, names, strict=True)]
    return list(zip(found, whole, strict=True))


def _source(source: str) -> DatasetSource:
    whole = source.partition(" (held out")[0]
    if "://" not in whole and not os.path.exists(whole):
        found = dataset_of(whole) if is_hub_id(whole) else HubDataset(whole)
        return HuggingFaceDatasetSource(
            path=found.name, config_name=found.config, split=found.split, revision=found.revision
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # MLflow warns that two of its own classes fit the address
        return resolve_dataset_source(whole)


def _name(source: str) -> str:
    whole, held_out, share = source.partition(" (held out")
    name = dataset_of(whole).label if is_hub_id(whole) else whole.rstrip("/").rpartition("/")[2]
    return name + held_out + share


EVERY_S = 10.0
"""Seconds between two passes, and between two samples of the machine's load (MLflow's own interval)."""
AGAIN_S = 1.0
"""Seconds between two passes at the end of a run, while MLflow does not answer."""
METRICS_AT_ONCE = 1000
PARAMETERS_AT_ONCE = 100
PARAMETER_LIMIT = 6000
"""MLflow's limits: metrics and parameters in a request, and characters in the value of a parameter."""
SAMPLES = 20
"""Approximate number of steps whose response samples go to MLflow; the run folder has those of every step."""
FILES = (
    *("config.toml", "run.json", "data.json", "code", "steps.jsonl", "evaluations.jsonl"),
    *("timeline.html", "failure.json"),
)
"""Files of the run folder that become artifacts at the end, and the folder with the user's code."""
START = "metronome.start"
RESUMED = "metronome.resumed"
FAILURE = "metronome.failure"
CHAMPION_TAG = "metronome.champion"
"""Tags of an MLflow run: where it starts (`continue_from`), how often it was resumed, the sentence of its failure, and
whether and why its policy became champion."""
TAG_LIMIT = 5000
"""MLflow's limit for the value of a tag, in characters."""
Item = TypeVar("Item")


class NewLines:
    """Reads the lines that another process appends to steps.jsonl, each once, also after the file was shortened, which
    replaces it."""

    def __init__(self, path: Path) -> None:
        self._lines = GrowingLines(path)
        self._newest = 0.0
        """Time (`ended_s`) of the newest line that was read."""

    def read(self) -> list[JsonObject]:
        """The complete lines that were added since the last call; none without a file. Raises BadInput for a damaged
        one, again in each later call."""
        new = [row for row in self._lines.read_new() if row["ended_s"] > self._newest]
        self._newest = max([self._newest, *(row["ended_s"] for row in new)])
        return new


class Mirror:
    """Brings an MLflow run up to date with its run folder.

    A pass may be repeated, even by another process. Only the process that trains mirrors the steps; any process mirrors
    evaluations.
    """

    def __init__(
        self,
        run: Run,
        config: Config,
        tags: Mapping[str, str],
        trains: bool = True,
        also: Callable[[int, Mapping[str, float]], None] = lambda step, figures: None,
    ) -> None:
        """`tags`: further tags. `trains`: false for an evaluation, which does not change the settings of a run that has
        some. `also`: gets the step and the figures of each new line; of an evaluation, those that MLflow lacked."""
        self.lost: list[str] = []
        """Names of the items that MLflow has refused."""
        self._client = mlflow.MlflowClient()
        self._run = run
        self._id = run.info.run_id
        self._config = config
        self._folder = run_folder(config)
        self._trains = trains
        self._also = also
        self._begun = bool(run.data.params)
        self._stepped = False
        self._given_tags = tags
        self._parameters = dict(run.data.params)
        self._tags = dict(run.data.tags)
        self._lines = NewLines(self._folder.steps)
        self._rows = self._lines.read() if trains else []
        """Lines of steps.jsonl that MLflow may lack."""
        self._there: dict[str, set[int]] = {}
        """By the name of a metric, the times in ms of its points in MLflow when this process began."""
        self._evaluations: set[float] = set()
        """Times of the evaluations that are in MLflow."""
        self._samples: dict[Path, int] = {}
        """Modification time in ns of each file of samples that MLflow has."""
        self._load: list[Metric] = []
        self._once: set[str] = set()
        """Names of the once-only items that have been written."""

    def push(self, whole: bool = True) -> None:
        """Make one pass. `whole`: include what is written only at the end of a run.

        Items that MLflow refuses are reported and skipped. If MLflow does not answer, raises one of STORE_ERRORS with a
        note that names the item. Raises BadInput for a damaged file.
        """
        if self._folder.fence.is_passed:
            return
        for what, write in self._lacking(whole):
            try:
                retry_conflicts(write)
            except STORE_ERRORS as error:
                if not is_refused(error):
                    error.add_note(what)
                    raise
                self.lost.append(what)
                print_error(f"warning: MLflow ({shown_store()}) refuses {what}: {first_line(error)}")

    def lacking(self) -> list[str]:
        """Names of the items that MLflow lacks at the end of a run, up to a damaged file. No pass may follow this
        call."""
        found = [*self.lost]
        try:
            found.extend(what for what, _ in self._lacking(True))
        except BadInput as error:
            found.append(str(error))
        return found

    @property
    def is_settled(self) -> bool:
        """Whether settings and description may be written: the run is new, or this process has made a step of it.
        Otherwise its input may still be refused."""
        return self._stepped or not self._begun

    def sample_load(self, monitor: SystemMetricsMonitor) -> None:
        """Add CPU, memory, disk, network and NVIDIA devices of this machine as `system/...` (psutil, by MLflow). The
        metrics' step is in seconds since the run began."""
        now = int(time.time() * 1000)
        step = (now - self._run.info.start_time) // 1000
        monitor.collect_metrics()
        self._load += [
            Metric(f"system/{name}", value, now, step) for name, value in monitor.aggregate_metrics().items()
        ]
        for part in monitor.monitors:
            part.clear_metrics()

    def _lacking(self, whole: bool) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield each item that MLflow lacks: its name for messages, and the call that writes it. Make the call before
        asking for the next item, which records that this one is written."""
        for line in self._lines.read() if self._trains else ():
            self._stepped = True
            self._rows.append(line)
            self._also(line["step"], metric_values(line))
        settled = whole or self.is_settled
        if settled and (self._trains or not self._begun):
            fresh = [Param(name, value) for name, value in self._settings().items() if name not in self._parameters]
            for params in _parts(fresh, PARAMETERS_AT_ONCE):
                yield "parameters", partial(self._client.log_batch, self._id, params=params)
                self._parameters |= {one.key: one.value for one in params}
        if settled and (tags := self._lacking_tags(whole)):
            yield "tags", partial(self._tag, tags)
        if rows := self._rows:
            ends = dict.fromkeys((rows[0]["step"], rows[-1]["step"]))
            yield f"metrics of step {' to '.join(map(str, ends))}", partial(self._log_steps, rows)
            self._rows = []
        if (load := list(self._load)) and (whole or self._begun or self._stepped):
            # MLflow shows first what was logged first
            yield "system metrics", partial(self._log, load)
            self._load = self._load[len(load) :]
        for row in rows_of(self._folder):
            if row["ended_s"] not in self._evaluations:
                yield f"evaluation of {row['benchmark']} at step {row['step']}", partial(self._log_evaluation, row)
                self._evaluations.add(row["ended_s"])
        if self._trains:
            yield from self._lacking_samples()
            yield from self._lacking_inputs()
        for path in [self._folder.path / name for name in FILES] if whole else ():
            if path.exists():
                yield path.name, partial(self._client.log_artifact, self._id, str(path))
        if settled and (whole or "texts" not in self._once):
            yield "the description", self._describe
            self._once.add("texts")

    def _settings(self) -> dict[str, str]:
        return {
            name: cut_parameter(clean_text(str(value)))
            for name, value in flatten_keys(self._config.model_dump(mode="json")).items()
        }

    def _lacking_tags(self, whole: bool) -> dict[str, str]:
        """The tags that MLflow lacks. Parameters cannot change in MLflow, so a value that differs in a resumed run is a
        tag `changed.KEY`."""
        tags = dict(self._given_tags)
        if self._trains:
            changed = {name: value for name, value in self._settings().items() if self._parameters.get(name) != value}
            tags |= {f"changed.{name}": value for name, value in changed.items()}
            tags |= self._fate(whole)
        return {name: value for name, value in tags.items() if self._tags.get(name) != value}

    def _lacking_samples(self) -> Iterator[tuple[str, Callable[[], object]]]:
        steps = self._config.train.steps
        for step in sorted({*range(0, steps, max(1, steps // SAMPLES)), steps - 1}):
            file = self._folder.samples_of(step)
            changed = file.stat().st_mtime_ns if file.exists() else None
            if changed is not None and self._samples.get(file) != changed:  # an old one may be deleted by now
                yield f"responses/{file.name}", partial(self._client.log_artifact, self._id, str(file), "responses")
                self._samples[file] = changed

    def _lacking_inputs(self) -> Iterator[tuple[str, Callable[[], object]]]:
        if "data" not in self._once and (self._folder.path / REPORT).exists():
            if (found := read_report(self._folder.path)) is not None:
                yield "the data sets", partial(log_datasets, self._client, self._id, found)
            self._once.add("data")
        if "model" not in self._once and self._folder.config.exists():
            model = Path(self._folder.read_config().model.path)
            if model.is_dir():  # not a name, which the config replaces by a folder when the training begins
                yield "the base model", partial(log_base_model, self._client, self._run, model)
                self._once.add("model")

    def _log_steps(self, rows: Sequence[JsonObject]) -> None:
        """Log the figures of lines of steps.jsonl."""
        there = self._times("step_s")
        lacking = [row for row in rows if _time(row) not in there]
        self._log([one for row in lacking for one in _metrics(row, metric_values(row), last="step_s")])

    def _log_evaluation(self, row: EvaluationRow) -> None:
        """Log the table of an evaluation, then its figures as `benchmark/avg_at_8` and so on."""
        figures = evaluation_figures(row)
        key = figure_name(row, "avg_at_k")
        if _time(row) in self._times(key):
            return
        table = self._folder.path / row["table"]
        if table.exists():  # else it was deleted as too old while MLflow was away
            self._client.log_artifact(self._id, str(table), "evaluations")
        self._log(_metrics(row, figures, last=key))
        self._also(row["step"], figures)

    def _times(self, name: str) -> set[int]:
        if name not in self._there:
            self._there[name] = {point.timestamp for point in self._client.get_metric_history(self._id, name)}
        return self._there[name]

    def _fate(self, whole: bool) -> dict[str, str]:
        """Tags that say how the run began, how often it was resumed and, if it has ended, how."""
        run = read_run(self._folder.path)
        tags = {START: run.start.start, RESUMED: str(len(run.resumes))}
        told = self._folder.last_failure() if whole else None
        if told is not None or self._tags.get(FAILURE):
            tags[FAILURE] = told[1][:TAG_LIMIT] if told is not None else ""
        if made := registered_policy(self._folder):
            tags[CHAMPION_TAG] = made.verdict[:TAG_LIMIT]
        return tags

    def _log(self, metrics: Sequence[Metric]) -> None:
        for part in _parts(metrics, METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=part)

    def _tag(self, tags: Mapping[str, str]) -> None:
        self._client.log_batch(self._id, tags=[RunTag(name, value) for name, value in tags.items()])
        self._tags |= tags

    def _describe(self) -> None:
        alone = not self._trains and not self._folder.steps.exists()
        text = (descriptions.of_evaluation if alone else descriptions.of_run)(self._config)
        descriptions.describe_run(self._client, self._id, text)


def _time(row: Mapping[str, Any]) -> int:
    """The timestamp of a line's figures, in ms."""
    return round(row["ended_s"] * 1000)


def _metrics(row: Mapping[str, Any], figures: Mapping[str, float], last: str) -> list[Metric]:
    """The figures of a line. The last one is there only if all are, since a batch may end between them."""
    names = sorted(figures, key=lambda name: name == last)
    return [Metric(name, figures[name], _time(row), row["step"]) for name in names]


class MirrorThread:
    """Makes a pass every `EVERY_S` seconds in a thread, so that a slow or absent MLflow never delays a run. It reports
    once that MLflow is away. It must be closed."""

    def __init__(self, mirror: Mirror, run_id: str) -> None:
        self._mirror = mirror
        self._monitor = SystemMetricsMonitor(run_id)
        self._away = False
        self._end = threading.Event()
        self._deadline = 0.0
        self._refused = False
        self._complete = False
        self._thread = threading.Thread(target=self._work, name="MLflow mirror", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End without a further pass."""
        self._complete = True
        self._end.set()

    def close(self, within_s: float, refused: bool = False) -> list[str]:
        """Write the rest within `within_s` seconds. Print and return what MLflow still lacks.

        `refused`: the run's input was refused. A known run of which this process made no step is then left unchanged.
        """
        self._refused = refused
        self._deadline = time.monotonic() + within_s
        self._end.set()
        self._thread.join(within_s + 0.5)
        missing = self._mirror.lost if self._complete else self._mirror.lacking()
        if missing:
            print_error(
                f"warning: MLflow ({shown_store()}) did not receive: {', '.join(dict.fromkeys(missing))}. "
                "Everything is in the run folder."
            )
        return missing

    def _work(self) -> None:
        while not self._end.is_set():
            self._push(whole=False)
            self._end.wait(EVERY_S)
            with contextlib.suppress(Exception):  # what the system does not tell may not end this thread
                self._mirror.sample_load(self._monitor)
        while not self._complete:
            self._complete = self._push(whole=False) and (self._keeps() or self._push(whole=True))
            if time.monotonic() + AGAIN_S > self._deadline:
                return
            time.sleep(0.0 if self._complete else AGAIN_S)

    def _keeps(self) -> bool:
        return self._refused and not self._mirror.is_settled

    def _push(self, whole: bool) -> bool:
        """Make a pass. Return whether it succeeded."""
        try:
            self._mirror.push(whole)
        except Exception as error:  # no error may stop the run or later passes
            if not self._away:
                what = "".join(getattr(error, "__notes__", ())) or "a file of the run folder"
                print_error(
                    f"warning: MLflow ({shown_store()}) does not take {what}: {first_line(error)}. The run continues; "
                    "what MLflow lacks is written when it answers"
                )
            self._away = True
            return False
        if self._away:
            print_error(f"MLflow ({shown_store()}) is answering again; what it lacked has been written")
        self._away = False
        return True


def cut_parameter(value: str) -> str:
    """A parameter's value, cut to MLflow's limit with a note at its end."""
    note = f" ... ({len(value)} characters; complete in config.toml)"
    return value if len(value) <= PARAMETER_LIMIT else value[: PARAMETER_LIMIT - len(note)] + note


def shown_store() -> str:
    """The address of MLflow's store, without a password."""
    return without_password(mlflow.get_tracking_uri())


def _parts(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))
