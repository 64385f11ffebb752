"""The process of one part: `python -m engine.tools.acceptance.part NAME FOLDER [KEY=VALUE ...]`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from engine.errors import MetronomeError
from engine.run.logs import log_traceback
from engine.run.process import drop_lifeline, watch_lifeline
from engine.tools.acceptance.notes import NoteWriter, PartEnded, PartTask, notes_of

NEED_A_RUN = ("completion", "weight sync", "training step", "sync against periodic")
"""The parts in `run_parts`. The others are in `device_parts`."""


def main(name: str, folder: Path, settings: list[str]) -> None:
    """Run the function of a part, and record how it ended. The process exits with 0 unless it crashes."""
    from engine.config.recipe import load_config

    notes = NoteWriter(notes_of(folder, name))
    notes.doing("import of torch")
    try:
        chosen = load_config(None, settings).platform.device
        module = import_module(f"engine.tools.acceptance.{'run_parts' if name in NEED_A_RUN else 'device_parts'}")
        part = getattr(module, name.replace(" ", "_"))
        part(PartTask(platform=chosen, settings=tuple(settings), folder=folder, notes=notes))
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
