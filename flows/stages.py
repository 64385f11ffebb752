"""Flows of a single stage: prepare the data, check the conversion, or run rollout instances or ranks for another
run.
"""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from engine.config.recipe import load_config
from engine.data.problem_statistics import DataReport, describe_report
from engine.types import JsonObject
from flows import QUICKSTART
from flows.settings import AS_RECIPE, Overrides, Recipe, Settings, configured
from tasks.cluster.flow_run import send_output
from tasks.cluster.other_nodes import run_node
from tasks.cluster.rollout_node import serve_until_the_run_ends
from tasks.stages.convert import convert_model
from tasks.stages.convert import describe_report as describe_conversion
from tasks.stages.input_checks import with_model_folder
from tasks.stages.prepare import prepare_data
from tasks.terminal.console import say


@flow(name="prepare", flow_run_name="prepare {recipe}")
def prepare(recipe: Recipe = QUICKSTART, overrides: Overrides = (), settings: Settings = AS_RECIPE) -> DataReport:
    """Read, clean, split and compare the recipe's problem sets; the report is an artifact.

    Args:
        recipe: TOML file with the run's configuration; those that ship are found by infra/recipes/NAME.toml.
        overrides: Any other key of the configuration, one KEY=VALUE each, for example data.prompt_template=chat.
        settings: The keys that differ from run to run; a key that is left out is as in the recipe.
    """
    with send_output():
        found = prepare_data(configured(recipe, settings, overrides))
        say("prepare data", describe_report(found))
        return found


@flow(name="convert", flow_run_name="convert {recipe}")
def convert(recipe: Recipe = QUICKSTART, overrides: Overrides = (), settings: Settings = AS_RECIPE) -> JsonObject:
    """Convert the recipe's model to Megatron's layout and back, and compare it with Hugging Face's logits.

    Args:
        recipe: TOML file with the run's configuration; those that ship are found by infra/recipes/NAME.toml.
        overrides: Any other key of the configuration, one KEY=VALUE each, for example model.path=/models/Qwen3-8B.
        settings: The keys that differ from run to run; a key that is left out is as in the recipe.
    """
    with send_output():
        config = with_model_folder(configured(recipe, settings, overrides))
        found = convert_model(config)
        say("convert", describe_conversion(found))
        return found


@flow(name="serve-rollouts")
def serve_rollouts(
    join: str,
    recipe: Recipe = QUICKSTART,
    overrides: Overrides = (),
    settings: Settings = AS_RECIPE,
    instances: int = 1,
    host: str = "127.0.0.1",
    config: str = "",
) -> None:
    """Run rollout instances on this flow's work pool that join a running run and end when the run ends.

    Args:
        join: The run: host:port of its orchestrator, or its run folder if this node sees it.
        recipe: The run's recipe; those that ship are found by infra/recipes/NAME.toml.
        overrides: The run's other keys, one KEY=VALUE each.
        settings: The run's settings.
        instances: How many instances this node starts.
        host: Address that they listen on; any but loopback needs METRONOME_TOKEN in the pool's environment.
        config: The run's config.toml, which a run gives in place of recipe, overrides and settings.
    """
    with send_output():
        found = load_config(config, ()) if config else configured(recipe, settings, overrides)
        serve_until_the_run_ends(with_model_folder(found), join, instances, host)


@flow(name="join-training")
def join_training(folder: str, wait_s: float = 600.0) -> None:
    """Run trainer ranks on this flow's node, for a run with parallel.nodes above 1, until its training is done.

    Args:
        folder: The run folder, which this node and the run's own node share.
        wait_s: Seconds to wait for the run to begin, or to restart after a crash.
    """
    with send_output():
        run_node(Path(folder), wait_s)
