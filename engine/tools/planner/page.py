"""A plan as pages that open offline: `plan.html`, and timelines of the simulated steps of the recipe and of the best
setting."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from engine.run.files import write_atomically
from engine.tools.pages import assemble_page
from engine.tools.planner.planning import Planned, Sensitivity
from engine.tools.planner.search import Ranked
from engine.tools.watch.page import draw_page

SHOWN = 20
"""Number of settings in the table."""
BARS = {"today": "the recipe", "chosen": "the plan's choice", "best": "the best then"}
"""Field of `Sensitivity` → name."""


def write_plan(plan: Planned, best: Ranked, changes: Sequence[Sensitivity], folder: Path) -> Path:
    """Write the pages of a plan to a folder. Return `plan.html`. best: the setting that is taken."""
    for name, one in (("recipe", plan.today), ("best", best)):
        _draw_timeline(one, folder / name)
    data = {
        "looked": f"{plan.looked:,} settings considered, {len(plan.best)} simulated. Seconds are predictions.",
        "settings": [
            _row(plan, plan.today, "the recipe"),
            *(_row(plan, one, str(one.candidate)) for one in plan.best[:SHOWN]),
        ],
        "names": [*BARS.values()],
        "changes": [
            {"name": change.name, "bars": [_bar(getattr(change, field)) for field in BARS]} for change in changes
        ],
        "assumptions": [[name, source] for name, source in plan.model.assumptions.items()],
    }
    target = folder / "plan.html"
    write_atomically(target, assemble_page(Path(__file__).parent, data))
    return target


def _draw_timeline(one: Ranked, folder: Path) -> None:
    """Write the simulated spans as a run's trace, and its page."""
    trace = folder / "trace"
    trace.mkdir(parents=True, exist_ok=True)
    write_atomically(trace / "simulated.jsonl", "".join(json.dumps(span) + "\n" for span in one.simulated.spans))
    draw_page(folder)


def _row(plan: Planned, one: Ranked, settings: str) -> list[str]:
    faster = plan.today.step_s / one.step_s
    return [f"{one.step_s:.2f} s", f"{faster:.2f}", str(one.devices), one.simulated.bound_by, settings]


def _bar(one: Ranked) -> dict[str, float | str]:
    return {"seconds": one.step_s, "setting": str(one.candidate)}
