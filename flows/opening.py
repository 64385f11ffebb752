"""How the flows that train begin: settings, folder, devices, MLflow run."""

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
    """A run that is under way."""

    config: Config
    folder: RunFolder
    entry: Entry
    overrides: list[str]
    """Its settings, its overrides and its seed, as `--set` takes them."""


@contextmanager
def opened(
    recipe: str,
    overrides: Sequence[str],
    settings: Settings,
    continue_from: ContinueFrom,
    resume: bool,
    pool_instances: int = 0,
) -> Iterator[Opened]:
    """The body in its run folder, with all its devices, tracked. Raises BadInput before anything slow."""
    with crashed_without_tracking():
        config, begun = started_from(settled(configured(recipe, settings, overrides)), recipe, continue_from)
    check_inputs(config)
    with entered(config, begun, resume) as entry, hold_npus(npus(config, pool_instances)), tracked_flow(config):
        yield Opened(
            config, RunFolder(config.folder), entry, [*settings.overrides(), *overrides, f"run.seed={config.run.seed}"]
        )
