"""`run.dry`: print the layout, memory and arithmetic of a recipe, and start nothing."""

from __future__ import annotations

from engine.config import Config
from engine.config.recipe import find_file
from engine.data.tokenizer import Tokenizer
from engine.tools.dry_run import plan_run, plan_sections
from tasks.stages.input_checks import check_reward
from tasks.terminal import console


def dry_run(config: Config) -> None:
    """Print the plan. Raises BadInput with every reason why the recipe cannot run, and for a reward or a program
    of the user's that can't be loaded or, if the model is here, a text in `rollout.stop` that is no token of it."""
    if config.rollout.program or any(":" in one.function for one in config.reward.named):
        check_reward(config)
    model = find_file(config.model.path)
    if config.rollout.stop and model.is_dir():
        Tokenizer(model, config.rollout.stop)
    for title, rows in plan_sections(plan_run(config)).items():
        console.print_table(title, rows)
    console.print_page("\nNothing was started. Memory is computed, not measured: docs/hardware.md says what it covers.")
