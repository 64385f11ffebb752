"""Finds evaluations of a run's own policy that already exist, so that none is repeated."""

from __future__ import annotations

from pathlib import Path

from engine.config import Config
from engine.data.tokenizer import Tokenizer
from engine.evaluation import tables
from engine.evaluation.benchmarks import encode_benchmarks, read_benchmarks, with_evaluation_context
from engine.evaluation.tables import EvaluationRow
from engine.run.folder import RunFolder


def done_before(config: Config, model: Path, weight_version: int, folder: RunFolder) -> list[EvaluationRow] | None:
    """For each benchmark, the newest row with the same policy, version, problems, sampling and seed.

    None if a benchmark has no such row, and for any model except the run's own policy. The run's own policy is
    determined by run and version, while the weights in another folder may have changed.
    """
    if model.resolve() != folder.policy.resolve():
        return None
    mine = [
        row
        for row in tables.rows_of(folder)
        if (row["model"], row["weight_version"]) == (str(model.resolve()), weight_version)
    ]
    if not mine:
        return None
    config = with_evaluation_context(config)
    benchmarks = encode_benchmarks(config, read_benchmarks(config), Tokenizer(model))
    wanted = [tables.evaluation_protocol(config, each.name, each.prompts) for each in benchmarks]
    found = [next((row for row in reversed(mine) if row["protocol"] == how), None) for how in wanted]
    rows = [row for row in found if row is not None]
    return rows if len(rows) == len(found) else None
