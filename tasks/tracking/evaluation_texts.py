"""Evaluations as text: a single one, several, and all of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.errors import counted
from engine.evaluation.tables import dropped_file, kind_of_average, rows_of
from engine.run.files import read_lines
from engine.run.folder import RunFolder


def describe_evaluation(row: Mapping[str, Any]) -> str:
    """One evaluation as text: accuracy or reward (avg@k), pass@k and maj@k with their 95 % intervals, and the number of
    responses that were cut."""
    return f"{kind_of_average(row.get('partial_scores'))} {_figures(row)}"


def accuracy_with_interval(row: Mapping[str, Any]) -> dict[str, str]:
    """Accuracy or reward (avg@k) with its 95 % interval as a row of a table."""
    text = f"{row['avg_at_k']:.3f} (95 % interval {row['ci_low']:.3f} to {row['ci_high']:.3f})"
    return {f"{kind_of_average(row.get('partial_scores'))} (avg@{row['samples']})": text}


def _figures(row: Mapping[str, Any]) -> str:
    k = row["samples"]
    figures = [f"avg@{k} {_with_interval(row, 'avg_at_k', '')}"]
    for name in ("pass", "maj") if k > 1 else ():
        figures += [f"{name}@{k} {_with_interval(row, f'{name}_at_k', f'{name}_')}"] if f"{name}_ci_low" in row else []
    problems = counted(row["problems"], "problem")
    return f"{', '.join(figures)} on {problems} of {row['benchmark']}{_cut(row)}{_unscored(row)}"


def _cut(row: Mapping[str, Any]) -> str:
    """The number of responses that a length limit has cut, which may explain low figures; empty if there are none."""
    if not row.get("truncated"):
        return ""
    by_context = f", {row['context_cut']} of them by the context" if row["context_cut"] else ""
    sampled = (row["problems"] + row["unscored_problems"]) * row["samples"]
    return f"; {row['truncated']:,} of {counted(sampled, 'response')} cut at the length limit{by_context}"


def _unscored(row: Mapping[str, Any]) -> str:
    """The responses that the reward failed on and the problems that are not in the figures, each kind by itself."""
    kinds = {
        "reward_timeouts": ("response", "timed out in the reward"),
        "reward_errors": ("response", "with an error of the reward"),
        "reward_excluded": ("response", "without a score, in no figure"),
        "unscored_problems": ("further problem", "without a score"),
        "incomplete_problems": ("problem", f"with fewer than {row['samples']} scores, not in pass@k"),
    }
    return "".join(f"; {counted(row[name], one)} {why}" for name, (one, why) in kinds.items() if row.get(name))


def describe_evaluations(rows: Sequence[Mapping[str, Any]]) -> str:
    """Evaluations as text, one line each, with the paired comparison if there is one."""
    lines = [
        describe_evaluation(row)
        + (
            f"; against version {row['against']['weight_version']}: {describe_difference(row['against'])}"
            if "against" in row
            else ""
        )
        for row in rows
    ]
    return "\n             ".join(lines)


def _with_interval(row: Mapping[str, Any], name: str, prefix: str) -> str:
    return f"{row[name]:.3f} [{row[prefix + 'ci_low']:.3f}, {row[prefix + 'ci_high']:.3f}]"


def describe_difference(found: Mapping[str, Any]) -> str:
    """A paired comparison as text."""
    return (
        f"{found['difference']:+.3f} [{found['ci_low']:+.3f}, {found['ci_high']:+.3f}], p = {found['p_value']:.2g}; "
        f"better on {found['better']:,}, worse on {found['worse']:,} of {counted(found['problems'], 'problem')}"
    )


def closing_rows(folder: RunFolder) -> dict[str, str]:
    """Rows of the table at the end of a run: those of `gain_rows`, and the cost of evaluations inside the run."""
    return gain_rows(folder) | _cost(rows_of(folder), list(read_lines(dropped_file(folder))))


def gain_rows(folder: RunFolder) -> dict[str, str]:
    """Rows with each benchmark's first and last evaluation, and their paired difference."""
    rows = rows_of(folder)
    names = list(dict.fromkeys(row["benchmark"] for row in rows))
    table: dict[str, str] = {}
    for name in names:
        own = [row for row in rows if row["benchmark"] == name]
        table |= _before_and_after(own, f" ({name})" if len(names) > 1 else "")
    return table


def _before_and_after(rows: Sequence[Mapping[str, Any]], which: str) -> dict[str, str]:
    first = rows[0]
    last = rows[-1]
    table = {
        f"{kind_of_average(row.get('partial_scores'))} {when}{which}": f"{_figures(row)} (version {version})"
        for when, row, version in (("before", first, first["weight_version"]), ("after", last, last["weight_version"]))
    }
    if "against" in last:
        table[f"difference{which}"] = describe_difference(last["against"])
    return table


def _cost(rows: Iterable[Mapping[str, Any]], lost: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A row with the cost of evaluations inside the run; empty if there were none."""
    rounds = {row["weight_version"]: row for row in rows if row.get("in_run")}
    if not rounds and not lost:
        return {}
    waited = sum(row["exposed_s"] for row in (*rounds.values(), *lost))
    gone = f", {len(lost)} dropped ({lost[-1]['reason']})" if lost else ""
    return {"evaluated in the run": f"{counted(len(rounds), 'time')}{gone}; training waited {waited:.1f} s for it"}
