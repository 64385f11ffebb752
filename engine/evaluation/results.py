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
from engine.errors import RewardError, StaleRolloutError, counted
from engine.evaluation import paired, tables
from engine.evaluation.benchmarks import EncodedBenchmark, encode_benchmarks, read_benchmarks, with_evaluation_context
from engine.evaluation.intervals import accuracy_figures, best_of, is_right, pass_curve
from engine.evaluation.tables import EvaluationRow, LengthFigures
from engine.evaluation.votes import Majority, majority_votes
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
    sampled: int,
    more: Mapping[str, Any],
) -> JsonObject:
    """Compute the results, write the table, compare with the first evaluation, and append the row to evaluations.jsonl.

    Returns the row. `sampled`: the version that the instances give the evaluated weights. `more`: further keys of the
    row. Raises StaleRolloutError if a response has another version, and RewardError if none has a score.
    """
    check_versions(groups, sampled)
    # a program may score by itself, and only the reward's answers are known
    votes = None if config.rollout.program else await majority_votes(groups, config.reward.function, verifier)
    found = await asyncio.to_thread(_compute, config, folder, subject, benchmark, groups, votes)
    return folder.add_evaluation({**found, **more})


def check_versions(groups: Sequence[Group], version: int) -> None:
    """Raise StaleRolloutError if any token was sampled from another weight version than `version`."""
    for group in groups:
        for number, response in enumerate(group.responses):
            if wrong := {found for _, found in response.versions} - {version}:
                raise StaleRolloutError(
                    f"evaluation of weight version {version}, prompt {group.prompt.id}, response {number} of "
                    f"{response.instance}: sampled from version {min(wrong)}"
                )


def _compute(
    config: Config,
    folder: RunFolder,
    subject: Subject,
    benchmark: EncodedBenchmark,
    groups: Sequence[Group],
    votes: Sequence[Majority] | None,
) -> JsonObject:
    """The row of an evaluation. Writes its table."""
    protocol = tables.evaluation_protocol(config, benchmark.name, [group.prompt for group in groups])
    table = tables.write_table(folder, (protocol, subject.model, subject.version), groups, votes)
    scores = [score for group in groups for score in group.scores]
    known = [number for number, group in enumerate(groups) if tables.known_values(group)]
    if not known:
        raise RewardError(
            f"evaluation on {benchmark.name}: none of {counted(len(scores), 'response')} has a score; the first: "
            f"{scores[0].status}: {scores[0].detail}; {table} has them all"
        )
    values = [tables.known_values(groups[number]) for number in known]
    right = [[is_right(score) for score in groups[number].scores if not score.excluded] for number in known]
    k = config.evaluate.samples
    row: EvaluationRow = {
        "step": subject.version,
        "weight_version": subject.version,
        "benchmark": benchmark.name,
        "model": subject.model,
        "problems": len(known),
        "unscored_problems": len(groups) - len(known),
        "incomplete_problems": sum(len(each) < k for each in right),
        "skipped": dict(benchmark.skipped),
        "samples": k,
        **accuracy_figures(k, values, right, [votes[number].value for number in known] if votes is not None else None),
        "pass_curve": pass_curve(k, right),
        **_lengths(groups, config.evaluate.max_new_tokens),
        "reward_timeouts": sum(score.status == "timeout" for score in scores),
        "reward_errors": sum(score.status == "error" for score in scores),
        "reward_excluded": sum(score.excluded for score in scores),
        "partial_scores": sum(value not in (0.0, 1.0) for each in values for value in each),
        "protocol": protocol,
        "table": str(table.relative_to(folder.path)),
    }
    if complete := [each for each in values if len(each) == k]:
        row["best_at_k_bootstrap"] = fmean(map(best_of, complete))
    if votes is not None:
        row["maj_at_k_bootstrap"] = fmean(votes[number].bootstrap for number in known)
    found: JsonObject = {**row, **_metric_means(groups)}
    base = tables.find_baseline(folder, row)
    if base is not None and (against := compare_rows(row, base, folder.path)):
        found["against"] = against
    return found


def compare_rows(row: EvaluationRow, base: EvaluationRow, folder: Path) -> JsonObject:
    """The paired comparison of two rows of evaluations.jsonl whose tables are in the folder, along with the model and
    version of `base`. Problems without a score in either are left out; {} if none is left."""
    ours, theirs = (tables.table_means(folder / one["table"]) for one in (row, base))
    both = ours.keys() & theirs.keys()
    if not both:
        return {}
    ours, theirs = ({key: means[key] for key in both} for means in (ours, theirs))
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
