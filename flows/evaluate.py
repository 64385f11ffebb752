"""Evaluation as a flow: a model folder, the policy of a run, or a registered policy on a benchmark."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from engine.run.folder import RunFolder
from engine.run.served_model import weight_version
from flows import QUICKSTART
from flows.settings import AS_RECIPE, Overrides, PoolInstances, Recipe, Settings, configured, form_errors
from tasks.attempt import evaluation_failure
from tasks.cluster.flow_run import name_flow_run, send_output
from tasks.stages.evaluate import evaluate_once
from tasks.stages.flow_entry import crashed_without_tracking, read_settled_config
from tasks.stages.input_checks import check_inputs, with_model_folder
from tasks.terminal.console import print_stage
from tasks.tracking import evaluation_texts
from tasks.tracking.flow_links import log_flow_evaluation
from tasks.tracking.registered_policies import model_folder
from tasks.tracking.tracked_run import check_store


@flow(name="evaluate")
def evaluate(
    recipe: Recipe = QUICKSTART,
    overrides: Overrides = (),
    settings: Settings = AS_RECIPE,
    model: str = "",
    run: str = "",
    on_rollout_pool: PoolInstances = 0,
) -> str:
    """Measure a model's accuracy and its interval; add it to a run folder's evaluations.jsonl and to its MLflow run.

    Nothing is sampled if the run has already evaluated the same policy with the same protocol and seed.

    Args:
        recipe: TOML file with the run's configuration; those that ship are found by infra/recipes/NAME.toml.
        overrides: Any other key of the configuration, one KEY=VALUE each, for example evaluate.samples=8.
        settings: The keys that differ from run to run; a key that is left out is as in the recipe.
        model: A Hugging Face folder, or nightly, latest or champion for a registered policy of this recipe. Empty means
            model.path.
        run: Name of the run that the figures belong to (its folder under run.output). Empty means run.name.
        on_rollout_pool: Number of rollout instances on the rollout pool during the evaluation, in addition to
            rollout.instances.
    """
    with send_output():
        given = [f"run.name={run}"] if run else []
        with crashed_without_tracking(), form_errors(settings, [*overrides, *given]):
            config = model_folder(
                read_settled_config(configured(recipe, settings, [*overrides, *given])), recipe, model
            )
            config = with_model_folder(check_inputs(config, training=False, evaluates=not on_rollout_pool)[0])
            folder = RunFolder(config.folder)
            chosen = Path(config.model.path)
            check_store(config)
            name_flow_run(f"evaluation of {config.run.name}", folder.path)
            if not folder.config.exists():
                folder.create(config, resume=False)
            with evaluation_failure(folder), print_stage("evaluate") as say:
                row = evaluate_once(config, chosen, weight_version(chosen), on_rollout_pool)
                found = evaluation_texts.describe_evaluation(row)
                say(found)
            log_flow_evaluation(config)
        return found
