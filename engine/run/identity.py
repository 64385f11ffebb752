"""The identity of a run: an id in its run.json and in each of its checkpoints.

A `run.name` may be reused with the same `checkpoint.path` (after a run folder was deleted, or with another
`run.output`). The id tells a run's own checkpoints apart: it resumes only from them, and deletes no others.
"""

from __future__ import annotations

import time
import uuid

from engine.config import Config
from engine.errors import BadInput
from engine.run.checkpoint_files import Marker, latest_checkpoint, read_marker
from engine.run.checkpoint_store import place_of, survey_place
from engine.run.run_file import RunFile, read_run, update_run


def claim_run(config: Config, resume: bool) -> None:
    """Give the run in the config's folder its id, if it has none yet. Call it before the run trains, with the folder's
    lock held.

    With `resume`, take the id of the newest complete checkpoint in the folder, or else in `checkpoint.path`; this
    continues a run whose folder was lost. Without `resume`, checkpoints at the run's place in `checkpoint.path` belong
    to another run. Raises BadInput in that case, and CheckpointError if the place cannot be read.
    """
    if read_run(config.folder).id:
        return
    if not resume:
        check_unclaimed(config)
    known = known_run(config) if resume else RunFile()
    new = {"id": known.id or uuid.uuid4().hex, "began": known.began or time.time()}
    update_run(config.folder, **new)


def known_run(config: Config) -> RunFile:
    """What is known of a resumed run, even before `claim_run` writes its id to a folder that was lost."""
    there = read_run(config.folder)
    marker = None if there.id else _newest_marker(config)
    return there if marker is None else RunFile(id=marker["run"], began=marker["began"])


def check_unclaimed(config: Config) -> None:
    """Raise BadInput if another run has checkpoints where this new run would publish, and CheckpointError if the place
    cannot be read."""
    if there := published_checkpoints(config):
        raise BadInput(
            f"{place_of(config)} (checkpoint.path and run.name) has checkpoints of another run: "
            f"{', '.join(sorted(there))}; give another --set run.name=NAME or checkpoint.path, delete them there, "
            "or continue that run with --resume"
        )


def published_checkpoints(config: Config) -> dict[str, Marker]:
    """The complete checkpoints, of any run, at the place where this run publishes; none without `checkpoint.path`."""
    return survey_place(place_of(config)).complete if config.checkpoint.path else {}


def _newest_marker(config: Config) -> Marker | None:
    """The marker of the newest complete checkpoint in the folder, or else in `checkpoint.path`; None if there is
    none."""
    if (newest := latest_checkpoint(config.folder / "checkpoints")) is not None:
        return read_marker(newest)
    there = published_checkpoints(config)
    return max(there.values(), key=lambda marker: int(marker["step"])) if there else None
