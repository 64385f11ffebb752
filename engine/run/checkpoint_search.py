"""Finds the checkpoint from which a run resumes: the newest intact one. Damaged ones are reported and kept aside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.errors import CheckpointError, DamagedCheckpointError
from engine.run import checkpoint_store as store
from engine.run.checkpoint_files import (
    DAMAGED,
    MARKER,
    all_complete,
    check_checkpoint,
    incomplete_checkpoints,
    set_aside,
    step_of,
)


def newest_whole(root: Path, place: str, run: str, say: Callable[[str], None]) -> Path | None:
    """Folder of the newest intact checkpoint in the root folder; None if the run has none.

    `place`: where run number `run` publishes its checkpoints, or "". It is read if the root folder has no checkpoint,
    or a damaged one. `say` gets a sentence about each skipped checkpoint. Damaged ones are renamed. Raises
    CheckpointError if all are damaged, because starting over would lose the run's steps.
    """
    interrupted = incomplete_checkpoints(root)
    for folder, message in interrupted.items():
        say(message)
        if (folder / MARKER).exists():  # it used to be complete
            set_aside(folder)
    found = None
    told: list[str] = []
    for folder in reversed(all_complete(root)):
        try:
            check_checkpoint(folder)
        except DamagedCheckpointError as error:
            told.append(str(error))
            say(f"{error}; skipped, and kept as {set_aside(folder).name}")
        else:
            found = folder
            break
    aside = [str(folder) for folder in sorted(root.glob(f"{DAMAGED}*"))]
    if place and (found is None or aside):
        here = -1 if found is None else step_of(found)
        found = _fetched(place=place, run=run, root=root, after=here, say=say) or found
        aside += [f"{place}/{name}" for name in store.damaged_checkpoints(place)]
    if found is None and aside:
        raise CheckpointError(
            "; ".join([*told, "no checkpoint of this run is intact"])
            + f"; to start again at step 0 delete the damaged ones: {', '.join(aside)}"
        )
    return found


def _fetched(place: str, run: str, root: Path, after: int, say: Callable[[str], None]) -> Path | None:
    """Download the newest intact checkpoint of a place that is of a later step than `after`; None if there is none."""
    there, damaged, interrupted = store.survey_place(place, run)
    for name, wrong in interrupted.items():
        say(f"checkpoint {place}/{name} is incomplete ({wrong}), ignored")
    for name, wrong in damaged.items():
        say(f"checkpoint {place}/{name}: {wrong}; skipped, and kept as {place}/{store.set_aside(place, name)}")
    for name in sorted(there, key=lambda name: there[name]["step"], reverse=True):
        if there[name]["step"] <= after:
            break
        try:
            folder = store.download_checkpoint(place, name, there[name], root)
            check_checkpoint(folder)
        except DamagedCheckpointError as error:
            say(f"{error}; skipped, and kept as {place}/{store.set_aside(place, name)}")
        else:
            say(f"checkpoint {name} comes from {place}")
            return folder
    return None
