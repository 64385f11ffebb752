"""Training as a flow, without evaluation and registration. When it finishes, an automation starts `evaluate`."""

from __future__ import annotations

from prefect import flow

from engine.run.run_file import ContinueFrom
from flows import QUICKSTART
from flows.pipeline import opened, run_stages, stages_for
from flows.settings import AS_RECIPE, Overrides, PoolInstances, Recipe, Settings
from tasks.stages import summary


@flow(name="train")
def train(
    recipe: Recipe = QUICKSTART,
    overrides: Overrides = (),
    settings: Settings = AS_RECIPE,
    continue_from: ContinueFrom = "base",
    on_rollout_pool: PoolInstances = 0,
    resume: bool = False,
) -> dict[str, str]:
    """Train and publish the final checkpoint.

    Args:
        recipe: TOML file with the run's configuration; those that ship are found by infra/recipes/NAME.toml.
        overrides: Any other key of the configuration, one KEY=VALUE each, for example rollout.temperature=0.9.
        settings: The keys that differ from run to run; a key that is left out is as in the recipe.
        continue_from: Where the run starts. base is model.path; latest is the newest registered policy of this recipe;
            nightly is the newest policy whose run was itself started with nightly; champion is the policy with that
            alias. latest and nightly mean base while there is no such policy.
        on_rollout_pool: Number of rollout instances on the rollout pool during the training, in addition to
            rollout.instances.
        resume: Continue the run of this run.name, which was cancelled or has failed. A run that crashed is resumed
            without it.
    """
    return run_stages(
        stages_for("announce"),
        opened(
            recipe=recipe,
            overrides=overrides,
            settings=settings,
            continue_from=continue_from,
            resume=resume,
            pool_instances=on_rollout_pool,
        ),
        lambda run: summary.training_rows(run.config),
    )
