"""The start of a flow that trains: settings, folder, devices, MLflow run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.config import Config
from engine.config.recipe import load_config
from engine.run.folder import RunFolder
from engine.run.run_file import ContinueFrom
from flows.settings import Settings, check_start, form_errors, given_keys, named_run
from tasks.attempt import EnteredRun
from tasks.cluster.devices import count_devices, hold_devices
from tasks.cluster.flow_names import name_flow_run, name_of
from tasks.cluster.other_nodes import other_nodes
from tasks.stages.flow_entry import begun_by_this_flow, crashed_without_tracking, enter_flow, read_settled_config
from tasks.stages.input_checks import check_address, check_inputs, check_run_folder
from tasks.stages.resume import Resumed, find_resumed
from tasks.stages.resume_checks import check_resume
from tasks.stages.train import train
from tasks.tracking.flow_links import tracked_flow
from tasks.tracking.registered_policies import check_names, started_from
from tasks.tracking.tracked_run import check_usable


@contextmanager
def opened(
    recipe: str,
    overrides: Sequence[str],
    settings: Settings,
    continue_from: ContinueFrom,
    resume: bool,
    pool_instances: int = 0,
) -> Iterator[EnteredRun]:
    """During the body, the run folder is locked, the devices are held and the run is tracked in MLflow.

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
        check_names(found.config, found.recipe)
        config, begun = started_from(read_settled_config(found.config), found.recipe, continue_from)
        again = begun_by_this_flow(RunFolder(config.folder))
        if not again:
            check_run_folder(config, resume)
            if not resume:
                given.tell(config, recipe)
        config, _ = check_inputs(config)
        if resume and not again:
            found.tell()
            config = check_resume(config)
        if not again:
            check_address(config)
            check_usable(config)
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
