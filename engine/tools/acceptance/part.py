"""The process of one part: `python -m engine.tools.acceptance.part NAME FOLDER [KEY=VALUE ...]`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import cast

from engine.errors import MetronomeError
from engine.run.logs import log_traceback
from engine.run.process import drop_lifeline, watch_lifeline
from engine.tools.acceptance.notes import NoteWriter, PartEnded, PartTask, notes_of

MODULES = {
    "versions": "device_parts",
    "devices": "device_parts",
    "kernels": "device_parts",
    "broadcast": "device_parts",
    "completion": "run_parts",
    "weight sync": "run_parts",
    "training step": "run_parts",
    "sync against periodic": "run_parts",
}
"""The module of each part. Its function has the part's name."""


def function_of(part: str) -> Callable[[PartTask], None]:
    """The function of a part. It is imported here, because that may fail on a machine that is not set up."""
    module = import_module(f"engine.tools.acceptance.{MODULES[part]}")
    return cast(Callable[[PartTask], None], getattr(module, part.replace(" ", "_")))


def main(name: str, folder: Path, settings: list[str]) -> None:
    """Run the function of a part, and record how it ended. The process exits with 0 unless it crashes."""
    from engine.config.recipe import load_config

    notes = NoteWriter(notes_of(folder, name))
    notes.doing("import of torch")
    try:
        chosen = load_config(None, settings).platform.device
        function_of(name)(PartTask(platform=chosen, settings=tuple(settings), folder=folder, notes=notes))
        notes.end("ok")
    except PartEnded as ended:
        notes.end(ended.status, str(ended), ended.remedy)
    except MetronomeError as error:
        notes.end("failed", f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - a library may raise anything on an untested machine
        log_traceback(error)
        notes.end("failed", f"{type(error).__name__}: {error}; the traceback is in its log")
    finally:
        drop_lifeline()


if __name__ == "__main__":
    watch_lifeline()
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
