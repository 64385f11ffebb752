"""The main job: prepare data → base model → convert → evaluate → train → publish → evaluate → register."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import flow

from engine.config import Config
from engine.config.recipe import load_config
from engine.data.problem_statistics import describe_report
from engine.run.folder import RunFolder
from engine.run.run_file import ContinueFrom
from engine.types import JsonObject
from flows import QUICKSTART
from flows.settings import (
    AS_RECIPE,
    Overrides,
    PoolInstances,
    Recipe,
    Settings,
    check_start,
    form_errors,
    given_keys,
    named_run,
)
from tasks.attempt import REGISTER, TRAIN, EnteredRun, RunStage, registered_policy
from tasks.cluster.devices import count_devices, hold_devices
from tasks.cluster.flow_run import name_flow_run, name_of, run_finished, send_output, training_finished
from tasks.cluster.other_nodes import other_nodes
from tasks.stages import summary
from tasks.stages.convert import base_model, convert_model
from tasks.stages.convert import describe_report as describe_conversion
from tasks.stages.evaluate import evaluate
from tasks.stages.flow_entry import begun_by_this_flow, crashed_without_tracking, enter_flow, read_settled_config
from tasks.stages.input_checks import check_address, check_inputs, check_run_folder
from tasks.stages.prepare import describe_prompts, encode_data, prepare_data
from tasks.stages.publish import publish, register
from tasks.stages.resume import Resumed, find_resumed
from tasks.stages.resume_checks import check_resume
from tasks.stages.train import train
from tasks.terminal import console
from tasks.tracking import evaluation_texts
from tasks.tracking.flow_links import tracked_flow
from tasks.tracking.registered_policies import started_from
from tasks.tracking.tracked_run import check_store


@contextmanager
def opened(
    recipe: str,
    overrides: Sequence[str],
    settings: Settings,
    continue_from: ContinueFrom,
    resume: bool,
    pool_instances: int = 0,
    evaluates: bool = False,
) -> Iterator[EnteredRun]:
    """During the body, the run folder is locked, the devices are held and the run is tracked in MLflow. `evaluates`:
    whether the run has evaluations of their own instances.

    Raises BadInput before anything slow starts.
    """
    with crashed_without_tracking(), form_errors(settings, overrides):
        given = given_keys(settings, overrides)
        if resume:
            found = find_resumed(recipe, given.run, given.deploy)
        else:
            check_start(given, continue_from)
            given = named_run(given, recipe, settings)
            found = Resumed(load_config(recipe, given.all), recipe)
        config, begun = started_from(read_settled_config(found.config), found.recipe, continue_from)
        again = begun_by_this_flow(RunFolder(config.folder))
        if not again:
            check_run_folder(config, resume)
            check_address(config)
        config, _ = check_inputs(config, evaluates=evaluates and not pool_instances)
        if resume and not again:
            found.tell()
            config = check_resume(config)
        if not again:
            check_store(config, trains=True)
    with (
        enter_flow(config, begun, resume) as finished,
        hold_devices(*count_devices(config, pool_instances)),
        tracked_flow(config),
    ):
        folder = RunFolder(config.folder)
        name_flow_run(name_of(folder), folder.path)

        def train_on_nodes(config: Config) -> int:
            with other_nodes(config, pool_instances) as placed:
                return train(placed.config, finished.resumed, placed.await_nodes)

        yield EnteredRun(
            config=config,
            train=train_on_nodes,
            finished=finished,
            recipe=str(folder.config.resolve()) if resume else recipe,
            overrides=[*given.all, f"run.seed={config.run.seed}"],
            registered=begun.registered,
            pool_instances=pool_instances,
        )


def _use_base_model(run: EnteredRun) -> str:
    run.config = base_model(run.config)
    return run.config.model.path


def _evaluate(run: EnteredRun, model: Path, version: int) -> Mapping[str, Any]:
    return evaluate(run.config, model, version, run.pool_instances)


def _register(run: EnteredRun) -> JsonObject:
    return asdict(register(run.registered, run.policy, run.config.run.accept))


def _registered(found: Mapping[str, Any]) -> str:
    return f"{found['name']} version {found['version']}"


def _announce(run: EnteredRun) -> None:
    if POLICY.format(steps=run.config.train.steps) not in run.finished.done:
        training_finished(
            recipe=run.recipe,
            run=run.config.run.name,
            policy=run.policy,
            overrides=run.overrides,
            pool_instances=run.pool_instances,
        )
    folder = RunFolder(run.config.folder)
    made = registered_policy(folder)
    champion = f"{made.name} version {made.version}" if made is not None and made.wins else ""
    run_finished(folder.path, summary.headline(folder), champion)


BASE = "evaluate version 0"
POLICY = "evaluate version {steps}"
STAGES = (
    RunStage("prepare data", lambda run: prepare_data(run.config), describe_report),
    RunStage("base model", _use_base_model, str, is_stored=False),
    RunStage(
        "encode", lambda run: encode_data(run.config, run.model), describe_prompts, ("prepare data", "base model")
    ),
    RunStage("convert", lambda run: convert_model(run.config), describe_conversion, ("base model",)),
    RunStage(BASE, lambda run: _evaluate(run, run.model, 0), evaluation_texts.describe_evaluation, ("base model",)),
    TRAIN,
    RunStage("publish", lambda run: publish(run.config), str, ("train",)),
    RunStage(
        POLICY,
        lambda run: _evaluate(run, run.policy, run.config.train.steps),
        evaluation_texts.describe_evaluation,
        ("train",),
    ),
    RunStage(REGISTER, _register, _registered, ("train", POLICY)),
    RunStage("announce", _announce, None, ("publish",)),
)
"""The stages of a run, in order."""


def stages_for(name: str) -> list[RunStage]:
    """A stage and the stages that it needs, directly or by others."""
    wanted = {name}
    for stage in reversed(STAGES):
        wanted.update(stage.needs if stage.name in wanted else ())
    return [stage for stage in STAGES if stage.name in wanted]


def run_stages(
    stages: Sequence[RunStage],
    entering: AbstractContextManager[EnteredRun],
    rows: Callable[[EnteredRun], dict[str, str]],
) -> dict[str, str]:
    """Enter a run (`opened`), run those of the stages that are not finished, and print and return the
    rows of the table at the end."""
    with send_output():
        with entering as run:
            steps = run.config.train.steps
            if run.finished.done.get("train", steps) != steps:  # train.steps was raised
                again = [stage for stage in STAGES if TRAIN in stages_for(stage.name)]
                run.finished.forget_stages(*(stage.stored_name(run) for stage in again))
            for stage in stages:
                stage.run(run)
        found = rows(run)
        console.print_table(f"Run {run.config.run.name}", found)
        return found


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
    return run_stages(
        STAGES,
        opened(
            recipe=recipe,
            overrides=overrides,
            settings=settings,
            continue_from=continue_from,
            resume=resume,
            pool_instances=on_rollout_pool,
            evaluates=True,
        ),
        _outcome,
    )


def _outcome(run: EnteredRun) -> dict[str, str]:
    done = run.finished.done
    places = {"checkpoint": done["publish"], "registered as": _registered(done[REGISTER])}
    return summary.outcome_rows(run.config, places)
