"""The main job: prepare data → base model → convert → evaluate → train → publish → evaluate → register."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from engine.config import Config
from engine.data.problem_statistics import describe_report
from engine.model.shape import content_hash
from engine.run.folder import RunFolder
from engine.run.run_start import ContinueFrom
from engine.types import JsonObject
from flows import QUICKSTART
from flows.opening import opened
from flows.settings import AS_RECIPE, Overrides, PoolInstances, Recipe, Settings
from tasks import console, stage_progress, summary
from tasks.base_model import base_model
from tasks.cluster.events import training_finished
from tasks.cluster.flow_log import story
from tasks.cluster.other_nodes import other_nodes
from tasks.code_version import code_hash
from tasks.console import stage
from tasks.convert import convert
from tasks.convert import describe as describe_conversion
from tasks.evaluate import evaluate
from tasks.flow_entry import Entry
from tasks.prepare import describe_prompts, encode_data, prepare_data
from tasks.progress_display import showing
from tasks.publish import publish
from tasks.register import register
from tasks.train import train


@flow(name="metronome")
def pipeline(
    recipe: Recipe = QUICKSTART,
    overrides: Overrides = (),
    settings: Settings = AS_RECIPE,
    continue_from: ContinueFrom = "base",
    on_rollout_pool: PoolInstances = 0,
    resume: bool = False,
) -> dict[str, str]:
    """Run every stage; returns the table of results. Raises BadInput before anything slow, MetronomeError later.

    A flow run that is restarted after a crash continues in its run folder and does not repeat finished stages.

    Args:
        recipe: TOML file with the run's configuration; those that ship are found by infra/recipes/NAME.toml.
        overrides: Any other key of the configuration, one KEY=VALUE each, for example rollout.temperature=0.9.
        settings: The keys that differ from run to run; a key that is left out is as in the recipe.
        continue_from: Where the run starts. base is model.path; latest is the newest registered policy of this recipe;
            nightly is the newest policy whose run was itself started with nightly; champion is the policy with that
            alias. latest and nightly mean base while there is no such policy.
        on_rollout_pool: Number of rollout instances on the rollout pool during the training and each evaluation,
            in addition to rollout.instances.
        resume: Continue the run of this run.name, which was cancelled or has failed. A run that crashed is resumed
            without it.
    """
    with story():
        with opened(
            recipe=recipe,
            overrides=overrides,
            settings=settings,
            continue_from=continue_from,
            resume=resume,
            pool_instances=on_rollout_pool,
        ) as run:
            entry = run.entry
            folder = run.folder
            config = _before_training(run.config, entry, on_rollout_pool)
            with other_nodes(config, on_rollout_pool), stage("train") as say:
                say(f"{entry.once('train', lambda: train(config, entry.resumed))} steps")
            with stage("publish") as say:
                say(published := entry.once("publish", lambda: publish(config)))
            _evaluate(
                config=config,
                model=folder.policy,
                version=config.train.steps,
                entry=entry,
                on_rollout_pool=on_rollout_pool,
            )
            with stage("register") as say:
                name = run.registered
                say(registered := f"{name} version {entry.once('register', lambda: register(name, folder.policy))}")
            entry.once(
                "announce",
                lambda: training_finished(
                    recipe=run.recipe,
                    run=config.run.name,
                    policy=folder.policy,
                    overrides=run.overrides,
                    pool_instances=on_rollout_pool,
                ),
            )
        rows = summary.outcome(config, published, registered)
        console.table(f"Run {config.run.name}", rows)
        return rows


def _before_training(config: Config, entry: Entry, on_rollout_pool: int) -> Config:
    """Run the stages before training, up to the evaluation of the untrained model. Return the config with the model's
    folder."""
    with (
        stage("prepare data") as say,
        showing("prepare data", stage_progress.since_now("reading and comparing the problems")),
    ):
        say(describe_report(entry.once("prepare data", lambda: prepare_data(config))))
    with stage("base model") as say:
        config = base_model(config)
        say(config.model.path)
    model = Path(config.model.path)
    with stage("encode") as say, showing("encode", stage_progress.since_now("encoding the prompts")):
        say(describe_prompts(entry.once("encode", lambda: encode_data(config, model))))
    with stage("convert") as say:
        say(describe_conversion(entry.once("convert", lambda: _converted(config, model))))
    _evaluate(config=config, model=model, version=0, entry=entry, on_rollout_pool=on_rollout_pool)
    return config


def _converted(config: Config, model: Path) -> JsonObject:
    with showing("convert", stage_progress.since_now("reading the model's files")):
        digest = content_hash(model)
    return convert(str(model), digest, code_hash("model", "platform"), RunFolder(config.folder).logs / "convert.log")


def _evaluate(config: Config, model: Path, version: int, entry: Entry, on_rollout_pool: int) -> None:
    with stage("evaluate") as say:
        row = entry.once(f"evaluate version {version}", lambda: evaluate(config, model, version, on_rollout_pool))
        say(summary.accuracy(row))
