"""The process of one part: `python -m engine.tools.acceptance.part NAME FOLDER [KEY=VALUE ...]`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from engine.errors import MetronomeError
from engine.run.process import drop_lifeline, watch_lifeline
from engine.tools.acceptance.notes import NoteWriter, PartFailed, PartSkipped, PartTask, notes_of


def _versions(task: PartTask) -> None:
    from engine.tools.acceptance.device_parts import versions

    versions(task)


def _devices(task: PartTask) -> None:
    from engine.tools.acceptance.device_parts import devices

    devices(task)


def _kernels(task: PartTask) -> None:
    from engine.tools.acceptance.device_parts import kernels

    kernels(task)


def _broadcast(task: PartTask) -> None:
    from engine.tools.acceptance.device_parts import broadcast

    broadcast(task)


def _completion(task: PartTask) -> None:
    from engine.tools.acceptance.completion import completion

    completion(task)


def _weight_sync(task: PartTask) -> None:
    from engine.tools.acceptance.run_parts import weight_sync

    weight_sync(task)


def _training_step(task: PartTask) -> None:
    from engine.tools.acceptance.run_parts import training_step

    training_step(task)


def _sync_against_periodic(task: PartTask) -> None:
    from engine.tools.acceptance.run_parts import sync_against_periodic

    sync_against_periodic(task)


PARTS: dict[str, Callable[[PartTask], None]] = {
    "versions": _versions,
    "devices": _devices,
    "kernels": _kernels,
    "broadcast": _broadcast,
    "completion": _completion,
    "weight sync": _weight_sync,
    "training step": _training_step,
    "sync against periodic": _sync_against_periodic,
}
"""The parts by name. Each imports torch itself, because the import may fail on a machine that is not set up."""


def main(name: str, folder: Path, settings: list[str]) -> None:
    """Run a part, and record how it ended. The process exits with 0 unless it crashes."""
    from engine.config.recipe import load_config

    notes = NoteWriter(notes_of(folder, name))
    notes.doing("import of torch")
    try:
        chosen = load_config(None, settings).platform.device
        PARTS[name](PartTask(platform=chosen, settings=tuple(settings), folder=folder, notes=notes))
        notes.end("ok")
    except PartSkipped as skipped:
        notes.end("skipped", str(skipped), skipped.remedy)
    except PartFailed as failed:
        notes.end("failed", str(failed), failed.remedy)
    except MetronomeError as error:
        notes.end("failed", f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - a library may raise anything on an untested machine
        traceback.print_exc()
        notes.end("failed", f"{type(error).__name__}: {error}; the traceback is in its log")
    finally:
        drop_lifeline()


if __name__ == "__main__":
    watch_lifeline()
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
