"""The files of an evaluation: a line of evaluations.jsonl, and a table with every problem and response."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from engine.config import Config
from engine.config.marks import Mark, marked_keys, value_of
from engine.config.table import keys_in
from engine.data.prompts import spell_columns
from engine.errors import BadInput
from engine.evaluation.intervals import Accuracy, is_right
from engine.evaluation.votes import Majority
from engine.run.files import read_lines, write_atomically
from engine.run.folder import RunFolder
from engine.run.run_inputs import code_of
from engine.types import Group, JsonObject, Prompt

Protocol = dict[str, Any]
"""How a benchmark is sampled and scored: "benchmark"; "problems_hash", over the prompts' ids and columns;
"prompts_hash", over their tokens, so over template, clock and tokenizer; "reward_hash", over the code of the reward and
the program, or ""; and keys of the config by their dotted names (of code, without its folder)."""

SEED = "run.seed"
"""The key of the protocol that may differ in two evaluations whose scores are compared."""
NOT_IN_PROTOCOL = {
    "what a run is called, keeps and checks": "run.name run.output run.resumes run.accept run.dry dry_run checkpoint "
    "tracking",
    "the row names the model": "model.path model.convert",
    "problems_hash has the problems and their columns": "data.train data.columns data.heldout data.heldout_fraction "
    "data.decontaminate evaluate.benchmark evaluate.folder evaluate.problems",
    "how much runs at once and where, which changes no more than rounding": "reward.workers rollout.instances "
    "rollout.tensor rollout.devices rollout.share_devices rollout.concurrency rollout.deterministic platform cluster",
    "when an evaluation begins, is repeated or fails as a whole": "rollout.timeout_s rollout.restarts "
    "rollout.heartbeat_s rollout.wait_s rollout.listen evaluate.every evaluate.max_wait_s",
    "an evaluation has keys of its own": "rollout.group_size rollout.max_new_tokens rollout.temperature rollout.top_p "
    "rollout.top_k rollout.partial",
    "it becomes rollout.max_context where it counts": "evaluate.max_context",
    "read by the training alone": "queue stages train algorithm attention parallel weights",
}
"""Why some keys and tables are not in the protocol. Every other key is in it, also a new one."""


class LengthFigures(TypedDict):
    """Lengths of an evaluation's responses."""

    response_length_mean: float
    """In tokens."""
    truncated: int
    """Number of responses that a limit cut."""
    context_cut: int
    """Number of responses that the context cut before `max_new_tokens` was reached."""


class _Further(TypedDict, total=False):
    ended_s: float
    """When the evaluation ended, in seconds since 1970; in every line (`RunFolder.add_evaluation`)."""
    seconds: float
    in_run: bool
    exposed_s: float
    """Seconds that weights waited for the evaluation."""
    against: JsonObject
    """A `Paired`, with the weight_version and model of the other evaluation."""
    maj_at_k_bootstrap: float
    """Present only if votes can be counted."""

    best_at_k_bootstrap: float
    """Present only if pass@k is."""


class EvaluationRow(Accuracy, LengthFigures, _Further):
    """A line of evaluations.jsonl."""

    step: int
    weight_version: int
    benchmark: str
    model: str
    problems: int
    """Number of problems with a response that has a score: those of avg@k and maj@k."""
    unscored_problems: int
    """Number of problems without, which are in no figure."""
    incomplete_problems: int
    """Number of those in `problems` that have fewer than k scores, which are not in pass@k, pass_curve and best@k."""
    skipped: dict[str, int]
    samples: int
    pass_curve: dict[str, float]
    reward_timeouts: int
    reward_errors: int
    """Numbers of responses whose score has this status, 0 or none."""
    reward_excluded: int
    """Number of responses without a score (reward.on_error, reward.on_timeout = "exclude"), which are in no figure."""
    partial_scores: int
    """Number of responses whose score is neither 0 nor 1. If there are any, avg@k is a reward, not an accuracy."""
    protocol: Protocol
    table: str
    """Path relative to the run folder."""


def kind_of_average(partial_scores: Any) -> str:  # noqa: ANN401
    """The name of avg@k for users: accuracy if every response is right or wrong, else (`partial_scores`) reward."""
    return "reward" if partial_scores else "accuracy"


def evaluation_protocol(config: Config, benchmark: str, prompts: Iterable[Prompt]) -> Protocol:
    """How the benchmark's prompts are sampled and scored."""
    each = sorted((prompt.id, spell_columns(prompt), list(prompt.token_ids)) for prompt in prompts)
    values = config.model_dump(mode="json")
    left_out = tuple(f"{name}." for names in NOT_IN_PROTOCOL.values() for name in names.split())
    keys = [key for key in keys_in(Config) if not f"{key}.".startswith(left_out)]
    code = {key: marks[-1] for key, marks in marked_keys(Config, Mark) if marks[-1].part == "reward"}
    return {
        "benchmark": benchmark,
        "problems_hash": _hash([one[:2] for one in each]),
        "prompts_hash": _hash([one[2] for one in each]),
        "reward_hash": code_of(config.folder, config, "reward")["hash"],
        **{key: value_of(values, key) for key in keys},
        **{key: mark.compared(value_of(values, key)) for key, mark in code.items()},
    }


def _hash(value: object) -> str:
    """16 hex digits over a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def protocol_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys in which two protocols differ, as "evaluate.samples (8, 1)" or, of a hash, as "problems"; empty if they
    are comparable."""
    return [
        key.removesuffix("_hash") if key.endswith("_hash") else f"{key} ({one.get(key)!r}, {other.get(key)!r})"
        for key in dict.fromkeys((*one, *other))
        if key != SEED and one.get(key) != other.get(key)
    ]


def write_table(
    folder: RunFolder, whose: tuple[Protocol, str, int], groups: Sequence[Group], votes: Sequence[Majority] | None
) -> Path:
    """Write one JSON object per problem: the problem, the number of right responses, the majority's answer, and all
    responses. Return the path, `evaluations/<benchmark>-v<version>-<hash>.jsonl` in the run folder. The hash is over
    the content and `whose` (protocol, model, weight version): only evaluations that are equal in all share a table."""
    rows = [_row(group, votes[number] if votes is not None else None) for number, group in enumerate(groups)]
    path = folder.path / "evaluations" / f"{whose[0]['benchmark'][:50]}-v{whose[2]:06d}-{_hash([whose, rows])}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def _row(group: Group, vote: Majority | None) -> dict[str, object]:
    scores = known_values(group)
    responses = [
        {
            "text": response.text,
            "score": None if score.excluded else score.value,
            "status": score.status,
            "answer": score.detail,
            **{f"reward/{name}": value for name, value in score.metrics.items()},
            "finish_reason": response.finish_reason,
            "tokens": len(response.token_ids),
            "seed": response.seed,
            "versions": [list(run) for run in response.versions],
        }
        for response, score in zip(group.responses, group.scores, strict=True)
    ]
    row = {
        "prompt_id": group.prompt.id,
        "problem": group.prompt.problem,
        "answer": group.prompt.answer,
        "mean": sum(scores) / len(scores) if scores else None,
        "right": sum(is_right(score) for score in group.scores),
        "samples": len(group.scores),
    }
    if vote is not None:
        row |= {
            "majority": vote.answer,
            "majority_votes": vote.votes,
            "majority_tied": vote.tied,
            "majority_value": vote.value,
        }
    return row | {"responses": responses}


def known_values(group: Group) -> list[float]:
    """The scores of a group's responses, without those that are excluded."""
    return [score.value for score in group.scores if not score.excluded]


def table_means(table: Path) -> dict[str, float]:
    """Prompt id → mean score, from a table, of the problems with a response that has a score. Raises BadInput if the
    file is missing or is not a table."""
    try:
        found = {row["prompt_id"]: float(row["mean"]) for row in read_lines(table) if row["mean"] is not None}
    except (KeyError, ValueError, TypeError) as error:
        raise BadInput(f"{table}: not an evaluation table ({error!r})") from None
    if not found:
        raise BadInput(f"{table}: there is no evaluation table")
    return found


def old_tables(folder: RunFolder, before: int) -> list[Path]:
    """The tables of evaluations during the training of versions before `before` that nothing needs. The first of each
    protocol is needed: later ones are compared with it."""
    rows = rows_of(folder)
    first = {str(row.get("protocol")): row["table"] for row in reversed(rows)}
    needed = {row["table"] for row in rows if not row.get("in_run") or row["weight_version"] >= before}
    old = dict.fromkeys(row["table"] for row in rows if row["table"] not in needed | set(first.values()))
    return [path for table in old if (path := folder.path / table).is_file()]


def rows_of(folder: RunFolder) -> list[EvaluationRow]:
    """The evaluations in the run folder, in the order in which they were written."""
    return list(read_lines(folder.evaluations))


def dropped_file(folder: RunFolder) -> Path:
    """Return the path of the file of dropped evaluations: one JSON object a line, with weight_version, reason and
    exposed_s."""
    return folder.path / "evaluations" / "dropped.jsonl"


def scores_by_version(folder: RunFolder) -> dict[int, float]:
    """avg@k of the run's weights by version, on its first benchmark, of evaluations made as the newest one of
    `evaluate.every`; empty if there is none."""
    rows = rows_of(folder)
    in_run = [row for row in rows if row.get("in_run")]
    if not in_run:
        return {}
    newest = max(row["weight_version"] for row in in_run)
    how = next(row for row in in_run if row["weight_version"] == newest)
    own = [row for row in rows if row["model"] == how["model"] or _is_in(row["model"], folder.path)]
    return {
        row["weight_version"]: row["avg_at_k"]
        for row in own
        if not protocol_differences(row["protocol"], how["protocol"])
    }


def awaited_versions(folder: RunFolder, config: Config, version: int) -> list[int]:
    """The weight versions up to `version` whose evaluation in the run is to come: those that are due since the last one
    of which there is a result, or a report that it was dropped."""
    rows = (*(row for row in rows_of(folder) if row.get("in_run")), *read_lines(dropped_file(folder)))
    settled = max((row["weight_version"] for row in rows), default=-1)
    every = config.evaluate.every
    due = range(0, version + 1, every) if every else ()
    return [one for one in due if one > settled and one != config.train.steps - 1]


def _is_in(model: str, folder: Path) -> bool:
    return Path(model).resolve().is_relative_to(folder.resolve())


def find_baseline(folder: RunFolder, row: EvaluationRow) -> EvaluationRow | None:
    """The first evaluation in the run folder that is comparable with the row and has another model or version; None if
    there is none."""
    for earlier in rows_of(folder):
        same = not protocol_differences(earlier["protocol"], row["protocol"])
        other = (earlier["weight_version"], earlier["model"]) != (row["weight_version"], row["model"])
        if same and other and (folder.path / earlier["table"]).is_file():
            return earlier
    return None
