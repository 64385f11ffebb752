"""The identity of a run: a number in its run folder and in each of its checkpoints. The number is a UUID of version 7,
which begins with the time when the run began.

A `run.name` may be reused with the same `checkpoint.path` (after a run folder was deleted, or with another
`run.output`). The number tells a run's own checkpoints apart: it resumes only from them, and deletes no others.
"""

from __future__ import annotations

import re
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path

from engine.config import Config
from engine.errors import BadInput
from engine.run.checkpoint_files import Marker, latest_checkpoint, read_marker
from engine.run.checkpoint_store import place_of, survey_place
from engine.run.files import write_atomically

FILE = "run_id"
NUMBER = re.compile("0[0-9a-f]{11}7[0-9a-f]{19}")
"""The form of a number. The first twelve digits are the time; the leading 0 holds until the year 2527."""


def read_run_id(folder: Path) -> str:
    """The number of the run in a folder, written by `claim_run_id`; "" if no run has begun there.

    Raises BadInput for a file with anything else, because without its number the run cannot recognise its own
    checkpoints.
    """
    file = folder / FILE
    if not file.exists():
        return ""
    number = file.read_text(errors="replace").removesuffix("\n")
    if not NUMBER.fullmatch(number):
        raise BadInput(
            f"{file}: {number!r} is not a run number (32 hexadecimal digits, as in a UUID of version 7); delete the "
            "file and resume, the number is then taken from the newest checkpoint"
        )
    return number


def claim_run_id(folder: Path, config: Config, resume: bool) -> None:
    """Give the run in a folder its number, if it has none yet. Call it before the run trains, with the folder's lock
    held.

    With `resume`, take the number of the newest complete checkpoint in the folder, or else in `checkpoint.path`; this
    continues a run whose folder was lost. Without `resume`, checkpoints at the run's place in `checkpoint.path` belong
    to another run. Raises BadInput in that case, and CheckpointError if the place cannot be read.
    """
    if (folder / FILE).exists():
        return
    if not resume:
        check_unclaimed(config)
    before = _newest_marker(folder, config) if resume else None
    folder.mkdir(parents=True, exist_ok=True)
    number = _new_number() if before is None else before["run"]
    write_atomically(folder / FILE, f"{number}\n")


def known_number(config: Config) -> str:
    """The number of a resumed run, even before `claim_run_id` writes it to a folder that was lost; "" if it has
    none.
    """
    number = read_run_id(config.folder)
    newest = None if number else _newest_marker(config.folder, config)
    return number if newest is None else newest["run"]


def run_began(number: str) -> datetime | None:
    """When the run with this number began, in UTC; None without a number."""
    return datetime.fromtimestamp(int(number[:12], 16) / 1000, UTC) if number else None


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


def _new_number() -> str:
    """A UUID of version 7 (RFC 9562, 5.7): 48 bits of milliseconds since 1970, the version, and a random rest."""
    return f"{time.time_ns() // 1_000_000:012x}7{uuid.uuid4().hex[13:]}"


def _newest_marker(folder: Path, config: Config) -> Marker | None:
    """The marker of the newest complete checkpoint in the folder, or else in `checkpoint.path`; None if there is
    none.
    """
    there = published_checkpoints(config) if (own := _own_marker(folder)) is None else {}
    return max(there.values(), key=lambda marker: int(marker["step"])) if there else own


def _own_marker(folder: Path) -> Marker | None:
    newest = latest_checkpoint(folder / "checkpoints")
    return read_marker(newest) if newest is not None else None
