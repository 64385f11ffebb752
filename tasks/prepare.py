"""Prepares data: reads, cleans, splits and compares the problem sets, encodes them for a model, and reports what was
left out and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import INPUTS, TASK_SOURCE

from engine.config import Config
from engine.data import prepared
from engine.data.problem_statistics import DataReport, report_data
from engine.data.problems import format_counts
from engine.data.prompts import encode_problems
from engine.data.tokenizer import Tokenizer
from engine.run.files import write_json
from engine.run.identity import read_run_id, run_began
from engine.types import JsonObject
from tasks.artifact_cells import cell, table_rows
from tasks.code_version import code_hash

REPORT = "data.json"
"""Name of the file in the run folder that holds the report of `engine.data.problem_statistics.report_data`."""

COMPARED = (
    "source",
    "rows",
    "version",
    "content_hash",
    "problem_characters",
    "answer_characters",
    "answers",
    "difficulty",
    "skipped",
)
"""Figures that the artifact shows for both sets."""

SHOWN = 25
"""Number of rejected rows and overlaps that the artifact lists; data.json has up to a thousand of each."""


class PromptFigures(TypedDict):
    """Figures of the training prompts. Lengths are in tokens."""

    prompts: int
    skipped: dict[str, int]
    tokens_min: int
    tokens_median: float
    tokens_max: int


def prepare_data(config: Config) -> DataReport:
    """The report on the run's problem sets, from the cache if the data, the settings and the code are unchanged.

    Writes the report to data.json in the run folder and as an artifact, because the body of a cached task does not run.
    """
    found = prepare(_settings(config), prepared.file_hashes(config), code_hash("data", "reward"))
    config.folder.mkdir(parents=True, exist_ok=True)
    write_json(config.folder / REPORT, found)
    create_markdown_artifact(page(found), key="data", description="What is in the data, what was left out and why")
    return found


def encode_data(config: Config, model: Path) -> PromptFigures:
    """Encode the prompts. Return how many fit the context, statistics of their lengths in tokens, and how many were
    skipped, by reason.

    Cached and written as an artifact, like `prepare_data`.
    """
    hashes = prepared.file_hashes(config)
    code = code_hash("data", "reward")
    found = encode_prompts(
        settings=_settings(config),
        model=str(model),
        max_context=config.rollout.max_context,
        clock=run_began(read_run_id(config.folder)) if config.data.prompt_template == "chat" else None,
        hashes=hashes,
        code=code,
    )
    create_table_artifact(table_rows(found), key="prompts", description="Prompts in tokens, what was left out and why")
    return found


@task(name="prepare data", cache_policy=INPUTS + TASK_SOURCE, persist_result=True, result_serializer="json")
def prepare(settings: Mapping[str, Any], hashes: Mapping[str, str], code: str) -> DataReport:
    """The report on the problem sets that these tables of a config describe. The hashes are only cache keys."""
    return report_data(prepared.prepare_problems(Config.model_validate(settings)))


@task(name="encode prompts", cache_policy=INPUTS + TASK_SOURCE, persist_result=True, result_serializer="json")
def encode_prompts(
    settings: Mapping[str, Any],
    model: str,
    max_context: int,
    clock: datetime | None,
    hashes: Mapping[str, str],
    code: str,
) -> PromptFigures:
    """Figures of the training prompts in tokens. The hashes are only cache keys."""
    problems = prepared.training_problems(Config.model_validate(settings))
    tokenizer = Tokenizer(Path(model))
    template = settings["data"]["prompt_template"]
    encoded = encode_problems(
        problems, tokenizer.hf, template, max_context, vocabulary=tokenizer.vocabulary(), clock=clock
    )
    lengths = [len(prompt.token_ids) for prompt in encoded.prompts]
    return {
        "prompts": len(encoded.prompts),
        "skipped": dict(encoded.skipped),
        "tokens_min": min(lengths),
        "tokens_median": median(lengths),
        "tokens_max": max(lengths),
    }


def describe(found: DataReport) -> str:
    """A report in one line for the console."""
    train = found["train"]
    heldout = found["heldout"]
    skips = f"; skipped {format_counts(train['skipped'])}" if train["skipped"] else ""
    notes = "".join(f"; {note}" for note in found["notes"])
    lengths = train["problem_characters"]
    return (
        f"{train['rows']} problems of {lengths['median']:.0f} characters ({lengths['min']:.0f}-{lengths['max']:.0f}), "
        f"{heldout['rows']} held out{skips}{notes}"
    )


def describe_prompts(found: PromptFigures) -> str:
    """The figures of `encode_data` in one line for the console."""
    skips = f"; skipped {format_counts(found['skipped'])}" if found["skipped"] else ""
    lengths = f"{found['tokens_median']:.0f} tokens ({found['tokens_min']}-{found['tokens_max']})"
    return f"{found['prompts']} prompts of {lengths}{skips}"


def page(found: DataReport) -> str:
    """A report as Markdown: the two sets side by side, their overlaps, and the rows that were left out."""
    sets = (found["train"], found["heldout"])
    rows = [[what, *(_cell(figures, what) for figures in sets)] for what in COMPARED]
    parts = ["# Data", _table(["", "training", "held out"], rows)]
    parts += [f"**Note:** {note}" for note in found["notes"]]
    overlaps = [[row["row"], row["overlaps_with"], f"{row['share']:.0%}"] for row in found["overlaps"][:SHOWN]]
    parts += [f"## Compared with {', '.join(found['compared_with']) or 'no other set'}"]
    parts += (
        [_table(["training row", "overlaps with", "share"], overlaps)]
        if overlaps
        else ["No training problem is in another set."]
    )
    rejected = [row for figures in sets for row in figures["rejected"]]
    if rejected:
        parts += ["## Rows left out", "\n".join(f"- `{row.replace('`', chr(39))}`" for row in rejected[:SHOWN])]
    return "\n\n".join(parts) + "\n"


def _settings(config: Config) -> JsonObject:
    """The tables of a config that `prepared.prepare_problems` reads. The cache key must contain nothing else."""
    return {
        "data": config.data.model_dump(mode="json"),
        "reward": {"function": "math" if config.reward.uses_math else "exact"},
        "evaluate": config.evaluate.model_dump(mode="json", include={"benchmark", "folder"}),
    }


def _cell(figures: Mapping[str, object], what: str) -> str:
    return cell(figures[what])


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
