"""How the flows that train begin: settings, folder, devices, MLflow run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.config import Config
from engine.run.run_folder import RunFolder
from flows.settings import ContinueFrom, Settings, configured
from tasks.cluster.devices import held, npus
from tasks.entry import Entry, crashed_without_tracking, entered, settled
from tasks.inputs import check_inputs
from tasks.tracking.continuing import started_from
from tasks.tracking.links import tracked_flow


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
    recipe: str, overrides: Sequence[str], settings: Settings, continue_from: ContinueFrom, resume: bool, pool_instances: int = 0
) -> Iterator[Opened]:
    """The body in its run folder, with all its devices, tracked. Raises BadInput before anything slow."""
    with crashed_without_tracking():
        config = started_from(settled(configured(recipe, settings, overrides)), recipe, continue_from)
    check_inputs(config)
    with entered(config, resume) as entry, held(npus(config, pool_instances)), tracked_flow(config):
        yield Opened(config, RunFolder(config.folder), entry, [*settings.overrides(), *overrides, f"run.seed={config.run.seed}"])
