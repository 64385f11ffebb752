"""The identity of a run: a number in its run folder and in each of its checkpoints.

A `run.name` may be used again (after a run folder was deleted, or with another `run.output`) with the same
`checkpoint.path`. The number identifies a run's own checkpoints there: it resumes only from them, and deletes no
others.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from engine.config import Config
from engine.errors import BadInput
from engine.run.checkpoint_files import Marker, latest, read_marker
from engine.run.checkpoint_store import place_of, survey
from engine.run.files import write_atomically

FILE = "run_id"


def identity(folder: Path) -> str:
    """The number of the run in a folder, written by `claim`; "" if it has none."""
    file = folder / FILE
    return file.read_text() if file.exists() else ""


def claim(folder: Path, config: Config, resume: bool) -> None:
    """Give the run in a folder its number, if it has none yet. Call it before the run trains, with the folder's lock
    held.

    With `resume` it is the number of the newest complete checkpoint in the folder, or else in `checkpoint.path`: this
    continues a run whose folder was lost. Without `resume`, checkpoints at the run's place in `checkpoint.path` belong
    to another run. Raises BadInput in that case, and CheckpointError if the place cannot be read.
    """
    if (folder / FILE).exists():
        return
    before = _own_marker(folder) if resume else None
    if before is None and (there := published(config)):
        if not resume:
            raise BadInput(
                f"{place_of(config)} (checkpoint.path and run.name) has checkpoints of another run: "
                f"{', '.join(sorted(there))}; give another --set run.name=NAME or checkpoint.path, delete them there, "
                "or continue that run with --resume"
            )
        before = max(there.values(), key=lambda marker: int(marker["step"]))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / FILE, uuid.uuid4().hex if before is None else str(before.get("run", "")))


def published(config: Config) -> dict[str, Marker]:
    """The complete checkpoints, of any run, at the place where this run publishes; none without `checkpoint.path`."""
    return survey(place_of(config))[0] if config.checkpoint.path else {}


def _own_marker(folder: Path) -> Marker | None:
    newest = latest(folder / "checkpoints")
    return read_marker(newest) if newest is not None else None
