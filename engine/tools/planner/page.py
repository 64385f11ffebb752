"""A plan as pages that open offline: `plan.html`, and timelines of the simulated steps of the recipe and of the best
setting."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from engine.run.files import write_atomically
from engine.tools.planner.planning import Planned, Sensitivity
from engine.tools.planner.search import Ranked
from engine.tools.watch.page import draw_page

SHOWN = 20
"""Number of settings in the table."""
WIDTH = 640
"""Width of the longest bar in pixels."""
LABEL = 190
"""Space for a name in pixels."""
BARS = (
    ("today", "the recipe", "#bab0ac"),
    ("chosen", "the plan's choice", "#4e79a7"),
    ("best", "the best then", "#f28e2b"),
)
"""Field of `Sensitivity`, name, colour."""
HEIGHT = 11
"""Height of a bar in pixels."""
STYLE = """body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 62em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 }
td, th { text-align: left; padding: .2em 1em .2em 0; vertical-align: top }
th { border-bottom: 1px solid #999 } code { font-size: 13px } svg text { font-size: 12px; fill: #222 }"""


def write_plan(plan: Planned, best: Ranked, changes: Sequence[Sensitivity], folder: Path) -> Path:
    """Write the pages of a plan to a folder. Return `plan.html`. best: the setting that is taken."""
    timelines = {"the recipe as it is": ("recipe", plan.today), "the best setting": ("best", best)}
    links = [
        f'<li><a href="{_timeline(one, folder / name).relative_to(folder)}">{escape(title)}</a>, simulated</li>'
        for title, (name, one) in timelines.items()
    ]
    sections = [
        f"<style>{STYLE}</style>",
        "<h1>How many devices</h1>",
        f"<p>{plan.looked:,} settings considered, {len(plan.best)} simulated. Seconds are predictions.</p>",
        _table(
            ["step", "times as fast", "devices", "bound by", "settings"],
            [_row(plan, plan.today, "the recipe"), *(_row(plan, one, str(one.candidate)) for one in plan.best[:SHOWN])],
        ),
        "<h2>Steps on a time axis</h2>",
        f"<ul>{''.join(links)}</ul>",
        "<h2>Under other conditions</h2>",
        "<p>Seconds of a step if responses, instances or trainer were as stated.</p>",
        _chart(changes),
        "<h2>Assumptions</h2>",
        _table(["what", "value and source"], [[name, source] for name, source in plan.model.assumptions.items()]),
    ]
    target = folder / "plan.html"
    write_atomically(target, "\n".join(['<!doctype html><meta charset="utf-8"><title>plan</title>', *sections, ""]))
    return target


def _timeline(one: Ranked, folder: Path) -> Path:
    """Write the simulated spans as a run's trace, and its page."""
    trace = folder / "trace"
    trace.mkdir(parents=True, exist_ok=True)
    write_atomically(trace / "simulated.jsonl", "".join(json.dumps(span) + "\n" for span in one.simulated.spans))
    return draw_page(folder)


def _row(plan: Planned, one: Ranked, settings: str) -> list[str]:
    faster = plan.today.step_s / one.step_s
    return [f"{one.step_s:.3g} s", f"{faster:.2f}", str(one.devices), one.simulated.bound_by, settings]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _chart(changes: Sequence[Sensitivity]) -> str:
    """Three bars with their seconds for each change: the recipe, the plan's choice, and the best setting."""
    longest = max(getattr(change, field).step_s for change in changes for field, _, _ in BARS)
    step = HEIGHT * len(BARS) + 12
    drawn = []
    for place, change in enumerate(changes):
        top = place * step
        drawn.append(f'<text x="0" y="{top + 1.8 * HEIGHT:.0f}">{escape(change.name)}</text>')
        for number, (field, name, colour) in enumerate(BARS):
            seconds = getattr(change, field).step_s
            told = f"{name}: {seconds:.3g} s a step, {getattr(change, field).candidate}"
            long = seconds / longest * WIDTH
            y = top + number * HEIGHT
            drawn.append(
                f'<rect x="{LABEL}" y="{y}" width="{long:.1f}" height="{HEIGHT - 1}" fill="{colour}">'
                f"<title>{escape(told)}</title></rect>"
                f'<text x="{LABEL + long + 5:.1f}" y="{y + HEIGHT - 2}">{seconds:.3g}</text>'
            )
    legend = "".join(f'<span style="color:{colour}">&#9632;</span> {escape(name)} &nbsp; ' for _, name, colour in BARS)
    size = f'width="{LABEL + WIDTH + 70}" height="{len(changes) * step}"'
    return f"<p>{legend}</p><svg {size}>{''.join(drawn)}</svg>"
