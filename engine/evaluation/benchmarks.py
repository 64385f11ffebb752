"""The problem sets that are evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config import Config
from engine.data.benchmarks import FORMATS, benchmark_paths
from engine.data.prepared import heldout_problems
from engine.data.problems import Problems, read_problems


@dataclass(frozen=True)
class Benchmark:
    """A problem set to evaluate on."""

    name: str
    """Of `engine.data.benchmarks.FORMATS`, or the file's name without suffix."""
    problems: Problems

    @property
    def note(self) -> str:
        """What is unusual about it, for people; empty if nothing is."""
        known, found = FORMATS.get(self.name), len(self.problems.rows)
        if known is None or found == known.problems:
            return ""
        return f"{self.name} has {found} problems here, {known.problems} on the hub ({known.hub})"


def read_benchmarks(config: Config) -> list[Benchmark]:
    """Those that `evaluate.benchmark` names, else the held-out problems; the first decides where one must.

    Raises BadInput as `benchmark_paths` and `read_problems`.
    """
    named = [Benchmark(name, read_problems(path)) for name, path in benchmark_paths(config).items()]
    return named or [Benchmark(Path(config.data.heldout).stem or "heldout", heldout_problems(config))]
