"""The results of the acceptance parts, as text for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from engine.types import JsonObject

FORMAT = 1
"""Version of the JSON report."""


@dataclass(frozen=True)
class PartResult:
    """The result of one part."""

    part: str
    status: Literal["ok", "failed", "skipped"]
    seconds: float
    lines: tuple[str, ...] = ()
    """Observations, as sentences."""
    figures: JsonObject = field(default_factory=dict)
    reason: str = ""
    """Why it failed or was skipped. Several lines if it includes the end of a log."""
    remedy: str = ""
    """What to do about a failure, or how to make a skipped part run."""


def text(result: PartResult, number: int, count: int) -> str:
    """The section of a part, in Markdown."""
    lines = [f"## {number}/{count} {result.part}: {result.status} ({result.seconds:.0f} s)", ""]
    lines += [f"- {line}" for line in result.lines]
    if result.reason:
        first, *log = result.reason.splitlines()
        lines.append(f"- {result.status}: {first}")
        lines += ["", *(f"      {line.strip()}" for line in log), ""] if log else []
    if result.remedy:
        lines.append(f"- what to do: {result.remedy}")
    return "\n".join(lines) + "\n"


def summary(results: Sequence[PartResult]) -> str:
    """The last section: a table of all parts, and one sentence."""
    rows = [f"| {one.part} | {one.status} | {one.seconds:.0f} s |" for one in results]
    return "\n".join(["## Summary", "", "| part | result | took |", "|---|---|---|", *rows, "", f"{verdict(results)}"])


def verdict(results: Sequence[PartResult]) -> str:
    """One sentence: the number of parts by status, and the seconds."""
    statuses = Counter(one.status for one in results)
    counts = ", ".join(f"{statuses[status]} {status}" for status in ("ok", "failed", "skipped") if statuses[status])
    return f"{counts}, in {sum(one.seconds for one in results):.0f} s."


def healthy(results: Sequence[PartResult]) -> bool:
    """Whether no part has failed."""
    return all(one.status != "failed" for one in results)


def as_json(results: Sequence[PartResult], settings: Sequence[str]) -> JsonObject:
    """The whole report. `settings`: the command's overrides."""
    return {
        "format": FORMAT,
        "healthy": healthy(results),
        "settings": list(settings),
        "seconds": round(sum(one.seconds for one in results), 1),
        "parts": [asdict(one) | {"seconds": round(one.seconds, 1)} for one in results],
    }
