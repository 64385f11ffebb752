"""Prepares data: reads, cleans, splits and compares the problem sets, encodes them for a model, and reports what was
left out and why."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import INPUTS, TASK_SOURCE

from engine.config import Config
from engine.data import prepared
from engine.data.problem_statistics import REPORT, DataReport, report_data
from engine.data.problems import format_counts
from engine.data.prompts import encode_problems
from engine.data.tokenizer import Tokenizer
from engine.run.files import write_json
from engine.run.identity import read_run_id, run_began
from engine.types import JsonObject
from tasks.artifact_cells import code_span, format_cell, markdown_table, markdown_text, table_rows
from tasks.code_version import code_hash
from tasks.progress_display import show_progress, since_now

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
    with show_progress("prepare data", since_now("reading and comparing the problems")):
        found = prepare(_settings(config), prepared.file_hashes(config), code_hash("data", "reward"))
    config.folder.mkdir(parents=True, exist_ok=True)
    write_json(config.folder / REPORT, found)
    create_markdown_artifact(
        report_page(found), key="data", description="What is in the data, what was left out and why"
    )
    return found


def encode_data(config: Config, model: Path) -> PromptFigures:
    """Encode the prompts. Return how many fit the context, statistics of their lengths in tokens, and how many were
    skipped, by reason.

    Cached and written as an artifact, like `prepare_data`.
    """
    with show_progress("encode", since_now("encoding the prompts")):
        found = encode_prompts(
            settings=_settings(config),
            model=str(model),
            max_context=config.rollout.max_context,
            clock=run_began(read_run_id(config.folder)) if config.data.prompt_template == "chat" else None,
            hashes=prepared.file_hashes(config),
            code=code_hash("data", "reward"),
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
    config = Config.model_validate(settings)
    tokenizer = Tokenizer(Path(model))
    encoded = encode_problems(
        prepared.training_problems(config),
        tokenizer.hf,
        config.data,
        max_context,
        vocabulary=tokenizer.vocabulary(),
        clock=clock,
    )
    lengths = [len(prompt.token_ids) for prompt in encoded.prompts]
    return {
        "prompts": len(encoded.prompts),
        "skipped": dict(encoded.skipped),
        "tokens_min": min(lengths),
        "tokens_median": median(lengths),
        "tokens_max": max(lengths),
    }


def describe_prompts(found: PromptFigures) -> str:
    """The figures of `encode_data` in one line for the console."""
    skips = f"; skipped {format_counts(found['skipped'])}" if found["skipped"] else ""
    lengths = f"{found['tokens_median']:.0f} tokens ({found['tokens_min']}-{found['tokens_max']})"
    return f"{found['prompts']} prompts of {lengths}{skips}"


def report_page(found: DataReport) -> str:
    """A report as Markdown: the two sets side by side, their overlaps, and the rows that were left out."""
    sets = (found["train"], found["heldout"])
    rows = [[what, *(_cell(figures, what) for figures in sets)] for what in COMPARED]
    parts = ["# Data", markdown_table(["", "training", "held out"], rows)]
    parts += [f"**Note:** {markdown_text(note)}" for note in found["notes"]]
    overlaps = [[row["row"], row["overlaps_with"], f"{row['share']:.0%}"] for row in found["overlaps"][:SHOWN]]
    parts += [f"## Compared with {markdown_text(', '.join(found['compared_with'])) or 'no other set'}"]
    parts += (
        [markdown_table(["training row", "overlaps with", "share"], overlaps)]
        if overlaps
        else ["No training problem is in another set."]
    )
    rejected = [row for figures in sets for row in figures["rejected"]]
    if rejected:
        parts += ["## Rows left out", "\n".join(f"- {code_span(row)}" for row in rejected[:SHOWN])]
    return "\n\n".join(parts) + "\n"


def _settings(config: Config) -> JsonObject:
    """The tables of a config that `prepared.prepare_problems` reads. The cache key must contain nothing else."""
    reward = config.reward
    return {
        "data": config.data.model_dump(mode="json"),
        "reward": {"function": "math" if reward.uses_math else "own:reward" if reward.is_own else "exact"},
        "evaluate": config.evaluate.model_dump(mode="json", include={"benchmark", "folder"}),
    }


def _cell(figures: Mapping[str, object], what: str) -> str:
    return format_cell(figures[what])
