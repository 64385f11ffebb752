"""Prepare data: read a problem set, and encode it for a model; both say what was left out and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import INPUTS, TASK_SOURCE

from engine.data.problems import counts, read_problems
from engine.data.prompts import encode
from engine.rollout.tokens import Tokens


@task(name="prepare data", cache_policy=INPUTS + TASK_SOURCE, persist_result=True, result_serializer="json")
def prepare(path: str, content_hash: str, code: str) -> dict[str, Any]:
    """Rows, skipped rows by reason, and the length of problems in bytes. The hashes only key the cache."""
    problems = read_problems(path)
    return {
        "source": problems.source,
        "rows": len(problems.rows),
        "skipped": dict(problems.skipped),
        **_lengths("bytes", [len(row.problem.encode()) for row in problems.rows]),
    }


@task(name="encode prompts", cache_policy=INPUTS + TASK_SOURCE, persist_result=True, result_serializer="json")
def encode_prompts(
    path: str, model: str, template: str, max_context: int, content_hash: str, code: str
) -> dict[str, Any]:
    """Usable prompts, all skips by reason, and the length of prompts in tokens. The hashes only key the cache."""
    encoded = encode(read_problems(path), Tokens(Path(model)).tokenizer, template, max_context)
    return {
        "prompts": len(encoded.prompts),
        "skipped": dict(encoded.skipped),
        **_lengths("tokens", [len(prompt.token_ids) for prompt in encoded.prompts]),
    }


def describe(figures: dict[str, Any], unit: str) -> str:
    """The figures in one line for people, and as an artifact (here, because a cached task's body does not run)."""
    _artifact("prepare-data" if unit == "bytes" else "encode-prompts", figures)
    kind = "prompts" if "prompts" in figures else "rows"
    skips = f"; skipped {counts(figures['skipped'])}" if figures["skipped"] else ""
    return (f"{figures[kind]} {kind} of {figures[unit + '_median']:.0f} {unit} "
            f"({figures[unit + '_min']}-{figures[unit + '_max']}){skips}")


def _lengths(unit: str, lengths: Sequence[int]) -> dict[str, float]:
    return {f"{unit}_min": min(lengths), f"{unit}_median": median(lengths), f"{unit}_max": max(lengths)}


def _artifact(key: str, figures: dict[str, Any]) -> None:
    rows = [{"figure": name, "value": str(value)} for name, value in figures.items()]
    create_table_artifact(rows, key=key, description="What is in the data, what was left out and why")
