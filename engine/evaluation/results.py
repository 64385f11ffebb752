"""Turns the scored groups of an evaluation into its results: votes, figures with intervals, and the comparison with the
first evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from engine.config import Config
from engine.data.tokenizer import Tokenizer
from engine.evaluation import paired, tables
from engine.evaluation.benchmarks import EncodedBenchmark, encode_benchmarks, read_benchmarks, with_evaluation_context
from engine.evaluation.intervals import accuracy_figures, best_of, is_right, pass_curve
from engine.evaluation.tables import EvaluationRow, LengthFigures
from engine.evaluation.votes import majority_votes
from engine.reward.scorer import ResponseScorer
from engine.run.folder import RunFolder
from engine.types import Group, JsonObject


@dataclass(frozen=True)
class Subject:
    """The weights that are evaluated."""

    model: str
    """The folder from which the weights were loaded; for the weights of a running training, the base model's folder."""
    version: int


async def record_evaluation(
    config: Config,
    folder: RunFolder,
    subject: Subject,
    benchmark: EncodedBenchmark,
    groups: Sequence[Group],
    verifier: ResponseScorer,
    more: Mapping[str, Any],
) -> JsonObject:
    """Compute the results, write the table, compare with the first evaluation, and append the row to evaluations.jsonl.

    Returns the row. `more`: further keys of the row.
    """
    votes = await majority_votes(groups, config.reward.function, verifier)
    how = tables.evaluation_protocol(config, benchmark.name, [group.prompt for group in groups])
    table = tables.path_of(folder, subject.model, subject.version, how)
    await asyncio.to_thread(tables.write_table, table, groups, votes)
    values = [[score.value for score in group.scores] for group in groups]
    right = [[is_right(score) for score in group.scores] for group in groups]
    row: EvaluationRow = {
        "step": subject.version,
        "weight_version": subject.version,
        "benchmark": benchmark.name,
        "model": subject.model,
        "problems": len(groups),
        "skipped": dict(benchmark.skipped),
        "samples": config.evaluate.samples,
        **accuracy_figures(values, [vote.value for vote in votes] if votes is not None else None, right),
        "pass_curve": pass_curve(right),
        "best_at_k_bootstrap": fmean(map(best_of, values)),
        **_lengths(groups, config.evaluate.max_new_tokens),
        "reward_timeouts": sum(score.status == "timeout" for group in groups for score in group.scores),
        "partial_scores": sum(value not in (0.0, 1.0) for scores in values for value in scores),
        "protocol": how,
        "table": str(table.relative_to(folder.path)),
    }
    if votes is not None:
        row["maj_at_k_bootstrap"] = fmean(vote.bootstrap for vote in votes)
    found: JsonObject = {**row, **_metric_means(groups), **more}
    if (base := tables.find_baseline(folder, row)) is not None:
        found["against"] = compare_rows(row, base, folder.path)
    return folder.add_evaluation(found)


def compare_rows(row: EvaluationRow, base: EvaluationRow, folder: Path) -> JsonObject:
    """The paired comparison of two rows of evaluations.jsonl whose tables are in the folder, along with the model and
    version of `base`."""
    ours, theirs = (tables.table_means(folder / one["table"]) for one in (row, base))
    found = paired.compare_paired(ours, theirs, row["samples"])
    return {"weight_version": base["weight_version"], "model": base["model"], **found.as_dict()}


def _metric_means(groups: Sequence[Group]) -> dict[str, float]:
    """ "reward/NAME": the mean of each metric of the scores, over the responses that have it."""
    values: dict[str, list[float]] = {}
    for score in (score for group in groups for score in group.scores if not score.excluded):
        for name, value in score.metrics.items():
            values.setdefault(f"reward/{name}", []).append(value)
    return {name: fmean(found) for name, found in values.items()}


def _lengths(groups: Sequence[Group], limit: int) -> LengthFigures:
    """Mean length in tokens, the number of responses that a limit has cut, and the number among these that the context
    has cut before max_new_tokens."""
    responses = [response for group in groups for response in group.responses]
    cut = [response for response in responses if response.truncated]
    return {
        "response_length_mean": sum(len(response.token_ids) for response in responses) / len(responses),
        "truncated": len(cut),
        "context_cut": sum(len(response.token_ids) < limit for response in cut),
    }


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
