"""The problem sets of evaluations, and their prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from engine.config import Config
from engine.data.benchmark_files import FORMATS, benchmark_paths
from engine.data.hub import set_name
from engine.data.prepared import each_once, heldout_problems
from engine.data.problems import Problems, format_counts, read_problems
from engine.data.prompts import encode_problems
from engine.data.row_format import RowFormat
from engine.data.tokenizer import Tokenizer
from engine.errors import counted
from engine.run.run_file import read_run
from engine.types import Prompt


@dataclass(frozen=True)
class Benchmark:
    """A problem set to evaluate on."""

    name: str
    """A name of `engine.data.benchmark_files.FORMATS`, or the file's name without suffix."""
    problems: Problems

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user: how rows were read, which were left out, and an unusual number of problems."""
        known = FORMATS.get(self.name)
        found = len(self.problems.rows)
        notes = list(self.problems.notes)
        if skipped := format_counts(self.problems.skipped):
            notes.append(f"{self.name}: {counted(found, 'problem')}, each evaluated once; skipped rows: {skipped}")
        if known is not None and found != known.problems:
            notes.append(f"{self.name} has {counted(found, 'problem')} here, {known.problems} on the hub ({known.hub})")
        return tuple(notes)


def read_benchmarks(config: Config) -> list[Benchmark]:
    """The benchmarks that `evaluate.benchmark` names, else the held-out problems, with each problem once. The first one
    decides which policy is champion.

    Raises BadInput like `benchmark_paths` and `read_problems`.
    """
    layout = RowFormat.of(config)
    sets = {name: read_problems(path, layout) for name, path in benchmark_paths(config).items()}
    sets = sets or {set_name(config.data.heldout) or "heldout": heldout_problems(config)}
    return [Benchmark(name, each_once(problems, config.reward)) for name, problems in sets.items()]


@dataclass(frozen=True)
class EncodedBenchmark:
    """A benchmark's prompts, and the number of rows that were left out, by reason."""

    name: str
    prompts: tuple[Prompt, ...]
    skipped: Mapping[str, int]


def with_evaluation_context(config: Config) -> Config:
    """The config for instances that are started for an evaluation. If `evaluate.max_context` is set, it replaces
    `rollout.max_context`."""
    if not config.evaluate.max_context:
        return config
    rollout = config.rollout.model_copy(update={"max_context": config.evaluate.max_context})
    return config.model_copy(update={"rollout": rollout})


def encode_benchmarks(config: Config, benchmarks: Sequence[Benchmark], tokenizer: Tokenizer) -> list[EncodedBenchmark]:
    """The benchmarks' prompts, at most `evaluate.problems` of each. A chat template that asks for the time gets that of
    `run_clock`, else the present."""
    data = config.data
    context = config.rollout.max_context
    most = config.evaluate.problems or None
    clock = run_clock(config)
    encoded = [(one.name, encode_problems(one.problems, tokenizer, data, context, clock=clock)) for one in benchmarks]
    return [EncodedBenchmark(name, found.prompts[:most], found.skipped) for name, found in encoded]


def run_clock(config: Config) -> datetime | None:
    """When the run of the folder began, else the run whose policy the model is; None without either."""
    return read_run(config.folder).began_at or read_run(Path(config.model.path).parent).began_at
