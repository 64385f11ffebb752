"""`run.dry`: print the layout, memory and arithmetic of a recipe, and start nothing."""

from __future__ import annotations

from engine.config import Config
from engine.tools.dry_run import plan_run, plan_sections
from tasks import console


def dry_run(config: Config) -> None:
    """Print the plan. Raises BadInput with every reason why the recipe cannot run."""
    for title, rows in plan_sections(plan_run(config)).items():
        console.print_table(title, rows)
    print("\nNothing was started. Memory is computed, not measured: docs/ascend.md says what it covers.")
