"""The start of a flow that trains: settings, folder, devices, MLflow run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.config import Config
from engine.run.folder import RunFolder
from engine.run.start import ContinueFrom
from flows.settings import Settings, configured
from tasks.cluster.devices import hold_npus, npus
from tasks.flow_entry import Entry, crashed_without_tracking, entered, settled
from tasks.input_checks import check_inputs
from tasks.tracking.flow_links import tracked_flow
from tasks.tracking.registered_policies import started_from


@dataclass(frozen=True)
class Opened:
    """A run that has started."""

    config: Config
    folder: RunFolder
    entry: Entry
    overrides: list[str]
    """The settings, overrides and seed of the run, in the form of `--set`."""


@contextmanager
def opened(
    recipe: str,
    overrides: Sequence[str],
    settings: Settings,
    continue_from: ContinueFrom,
    resume: bool,
    pool_instances: int = 0,
) -> Iterator[Opened]:
    """During the body the run folder is locked, the devices are held and the run is tracked in MLflow.

    Raises BadInput before anything slow starts.
    """
    with crashed_without_tracking():
        config, begun = started_from(settled(configured(recipe, settings, overrides)), recipe, continue_from)
    check_inputs(config)
    with entered(config, begun, resume) as entry, hold_npus(npus(config, pool_instances)), tracked_flow(config):
        yield Opened(
            config, RunFolder(config.folder), entry, [*settings.overrides(), *overrides, f"run.seed={config.run.seed}"]
        )
