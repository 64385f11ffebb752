"""The alias `champion` of a registered model. It moves to a new version only if a paired comparison shows that the new
version is better."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import mlflow
from mlflow.entities.model_registry import ModelVersion

from engine.config import Config
from engine.data.problem_statistics import read_report
from engine.errors import BadInput
from engine.evaluation import tables
from engine.evaluation.champion import ChampionVerdict, Results, judge_challenge, judge_first
from engine.run.folder import RunFolder
from engine.run.run_file import read_run
from engine.run.run_inputs import find_inputs
from tasks.tracking import descriptions
from tasks.tracking.artifact_cells import markdown_text
from tasks.tracking.code_version import code_version
from tasks.tracking.mirror import TAG_LIMIT
from tasks.tracking.registered_policies import CHAMPION
from tasks.tracking.store import first_line
from tasks.tracking.tracked_run import quote_name

RESULTS = "policy_evaluation-{}.json"
"""Name, by version, of the run's artifact with the protocol and the mean score of every problem, for later comparisons.
It is stored next to `policy/`."""
REASON = "metronome.champion"
"""Tag of a version that says why it did or did not become champion."""
DISPLACED = "metronome.displaced"
"""Tag of a version that took the alias: the version that had it before, or None."""


def update_champion(name: str, version: str, folder: RunFolder, config: Config) -> ChampionVerdict:
    """Store the lineage and results of a new version, and give it the alias if it is better than the champion.

    The call may be repeated: a version that has the alias keeps it, with the original reason.
    """
    client = mlflow.MlflowClient()
    own = read_results(folder, config)
    made = client.get_model_version(name, version)
    for key, value in describe_lineage(folder, config).items():
        client.set_model_version_tag(name, version, f"metronome.{key}", value[:TAG_LIMIT])
    if own is not None:
        client.log_dict(made.run_id, own.as_dict(), RESULTS.format(version))
    return _challenge(client=client, made=made, own=own, folder=folder, config=config)


def _challenge(
    client: mlflow.MlflowClient, made: ModelVersion, own: Results | None, folder: RunFolder, config: Config
) -> ChampionVerdict:
    """Compare a version with the champion, and record the verdict. A version that took the alias is then compared with
    those that took it meanwhile, from the oldest on: a newer one has it only if it is better. So all of them come to
    the same champion."""
    name = made.name
    version = str(made.version)
    holder = _holder(client, name)
    champion = None if holder is None else client.get_model_version(name, holder)
    if champion is not None and holder == version:
        return ChampionVerdict(True, champion.tags.get(REASON, "it already has the alias"))
    verdict = _verdict(champion, own, base_results(folder, config, own))
    if verdict.wins:
        client.set_model_version_tag(name, version, DISPLACED, str(holder))
    _record(client, made, verdict, folder, config)
    if not verdict.wins:
        return verdict
    client.set_registered_model_alias(name, CHAMPION, version)
    rivals = {int(one.version): _stored_results(one) for one in _rivals(client, made)}
    (best, theirs), *newer = sorted({**rivals, int(version): own}.items())
    for number, results in newer:
        if judge_challenge(results, theirs).wins:
            best, theirs = number, results
    if best != int(version):
        verdict = replace(judge_challenge(own, theirs, f"version {best}"), wins=False)
        _record(client, made, verdict, folder, config)
    if rivals:
        client.set_registered_model_alias(name, CHAMPION, str(best))
    return verdict


def _record(
    client: mlflow.MlflowClient, made: ModelVersion, verdict: ChampionVerdict, folder: RunFolder, config: Config
) -> None:
    client.set_model_version_tag(made.name, str(made.version), REASON, verdict.reason[:TAG_LIMIT])
    how = f"It {'became' if verdict.wins else 'did not become'} `{CHAMPION}`: {markdown_text(verdict.reason)}."
    description = descriptions.of_policy(folder, config, how)[:TAG_LIMIT]
    client.update_model_version(made.name, str(made.version), description)


def _rivals(client: mlflow.MlflowClient, made: ModelVersion) -> list[ModelVersion]:
    """The versions that have taken the alias since this one was registered."""
    found = client.search_model_versions(f"name = {quote_name(made.name)}")
    return [
        one
        for one in found
        if str(one.version) != str(made.version)
        and DISPLACED in one.tags
        and one.last_updated_timestamp >= made.creation_timestamp
    ]


def describe_lineage(folder: RunFolder, config: Config) -> dict[str, str]:
    """The origin of a policy (base model, data, config, code, steps), and the figures of its evaluation."""
    base = Path(config.model.path)
    inputs = read_run(folder.path).inputs or find_inputs(config, base)
    row = final_evaluation(folder, config)
    report = read_report(folder.path)
    data = report["train"]["version"] if report else "unknown"
    begun = read_run(folder.path).start
    found = {
        "base_model": str(base),
        "start": begun.start,
        **{_HASHES[part]: one["hash"] for part, one in inputs.items() if one["hash"]},
        "data": ", ".join(one.path for one in config.data.sets),
        "data_version": data,
        "config_hash": hashlib.sha256(folder.config.read_bytes()).hexdigest(),
        "code_version": code_version(),
        "steps": str(config.train.steps),
        "mode": config.train.mode,
        "run_folder": str(folder.path.resolve()),
    }
    if begun.continued_from:
        found["continued_from"] = begun.continued_from
    if row is not None:
        found |= {
            "benchmark": row["benchmark"],
            f"avg_at_{row['samples']}": f"{row['avg_at_k']:.6f}",
            "interval": f"{row['ci_low']:.6f} to {row['ci_high']:.6f}",
            "protocol": json.dumps(row["protocol"]),
        }
    return found


_HASHES = {
    "weights": "base_model_hash",
    "tokenizer": "tokenizer_hash",
    "reward": "reward_hash",
    "algorithms": "algorithms_hash",
}


def final_evaluation(folder: RunFolder, config: Config) -> tables.EvaluationRow | None:
    """The last row of evaluations.jsonl for the run's final policy and first benchmark; None if there is none."""
    policy = str(folder.policy.resolve())
    wanted = config.train.steps
    rows = [
        row
        for row in tables.rows_of(folder)
        if row.get("model") == policy and row["weight_version"] == wanted and "protocol" in row
    ]
    first = rows[0]["benchmark"] if rows else ""
    return next((row for row in reversed(rows) if row["benchmark"] == first), None)


def read_results(folder: RunFolder, config: Config) -> Results | None:
    """The final policy's per-problem results; None if it was not evaluated."""
    row = final_evaluation(folder, config)
    return None if row is None else _results(folder, row)


def _results(folder: RunFolder, row: tables.EvaluationRow) -> Results:
    return Results(row["protocol"], tables.table_means(folder.path / row["table"]), row["reward_excluded"])


def base_results(folder: RunFolder, config: Config, own: Results | None) -> Results | None:
    """Per-problem results of the base model, evaluated in the same way as the final policy; None if there are none."""
    if own is None:
        return None
    base = Path(config.model.path).resolve()
    for row in tables.rows_of(folder):
        trained = row.get("in_run") and row["weight_version"] > 0  # such rows also name the base model
        if trained or "protocol" not in row or Path(row["model"]).resolve() != base:
            continue
        if not tables.protocol_differences(own.protocol, row["protocol"]) and (folder.path / row["table"]).is_file():
            return _results(folder, row)
    return None


def _verdict(champion: ModelVersion | None, own: Results | None, base: Results | None) -> ChampionVerdict:
    if champion is None:
        return judge_first(own, base)
    try:
        theirs = _stored_results(champion)
    except (mlflow.MlflowException, OSError, BadInput) as error:
        return ChampionVerdict(
            False,
            f"the results of the champion (version {champion.version}) can't be read: {first_line(error)}; if its "
            f"files are gone, give the alias {CHAMPION} to another version in MLflow",
        )
    return judge_challenge(own, theirs)


def _stored_results(version: ModelVersion) -> Results:
    return Results.of(mlflow.artifacts.load_dict(f"runs:/{version.run_id}/{RESULTS.format(version.version)}"))


def _holder(client: mlflow.MlflowClient, name: str) -> str | None:
    """The version that has the alias now; None if no version has it."""
    holder = client.get_registered_model(name).aliases.get(CHAMPION)
    return None if holder is None else str(holder)
