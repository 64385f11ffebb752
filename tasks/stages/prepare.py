"""Prepares data: reads, cleans, splits and compares the problem sets, writes the rows to the run folder for the later
stages, and reports what was left out and why. Counts the prompts' tokens."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import INPUTS, NO_CACHE, TASK_SOURCE

from engine.config import Config
from engine.data import prepared
from engine.data.problem_statistics import DataReport, record_data
from engine.data.problems import format_counts
from engine.data.prompts import encode_problems
from engine.data.tokenizer import Tokenizer
from engine.errors import counted
from engine.run.run_file import read_run
from tasks.terminal.progress_display import show_progress, since_now
from tasks.tracking.artifact_cells import code_span, format_cell, markdown_table, markdown_text, table_rows
from tasks.tracking.code_version import code_hash

COMPARED = ("source", "rows", "version", "content_hash", "problem_characters", "skipped")
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


@task(name="prepare data", cache_policy=NO_CACHE)
def prepare_data(config: Config) -> DataReport:
    """Write the run's problems and the report on them to the run folder. Return the report, which is also an
    artifact."""
    with show_progress("prepare data", since_now("reading and comparing the problems")):
        found = record_data(config, prepared.prepare_problems(config))
    create_markdown_artifact(
        report_page(found), key="data", description="What is in the data, what was left out and why"
    )
    return found


def encode_data(config: Config, model: Path) -> PromptFigures:
    """Encode the prompts. Return how many fit the context, statistics of their lengths in tokens, and how many were
    skipped, by reason.

    From the cache if problems, model, settings and code are unchanged. The artifact is written here, because the body
    of a cached task does not run.
    """
    with show_progress("encode", since_now("encoding the prompts")):
        found = encode_prompts(
            config=config,
            model=str(model),
            settings=prepared.problem_settings(config) | {"max_context": config.rollout.max_context},
            clock=read_run(config.folder).began_at if config.data.prompt_template == "chat" else None,
            hashes=prepared.file_hashes(config),
            code=code_hash("data", "reward"),
        )
    create_table_artifact(table_rows(found), key="prompts", description="Prompts in tokens, what was left out and why")
    return found


@task(
    name="encode prompts", cache_policy=INPUTS - "config" + TASK_SOURCE, persist_result=True, result_serializer="json"
)
def encode_prompts(
    config: Config,
    model: str,
    settings: Mapping[str, Any],
    clock: datetime | None,
    hashes: Mapping[str, str],
    code: str,
) -> PromptFigures:
    """Figures of the training prompts in tokens. Settings, hashes and code are only cache keys; the config is none."""
    tokenizer = Tokenizer(Path(model))
    problems = prepared.training_problems(config)
    encoded = encode_problems(problems, tokenizer, config.data, config.rollout.max_context, clock=clock)
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
    return f"{counted(found['prompts'], 'prompt')} of {lengths}{skips}"


def report_page(found: DataReport) -> str:
    """A report as Markdown: the two sets side by side, their overlaps, and the rows that were left out."""
    sets = (found["train"], found["heldout"])
    rows = [[what, *(format_cell(dict(figures)[what]) for figures in sets)] for what in COMPARED]
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
