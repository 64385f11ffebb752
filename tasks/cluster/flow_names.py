"""Names flow runs in Prefect after their run, and says in them where its folder is."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from engine.run.folder import RunFolder
from engine.run.run_file import read_run
from tasks.terminal.console import mark_lines, print_error

WORKED = "PREFECT__FLOW_RUN_ID"
"""Environment variable that a Prefect worker gives to the process of a flow run."""


FOLDER = "metronome.folder"
"""Label of a flow run with its run folder, by which an alert's command finds the logs from any place."""


def name_flow_run(name: str, folder: Path | None = None) -> None:
    """Replace the name that Prefect made up for this flow run, and label it with its run's folder. If the server does
    not accept them, only a warning is printed, and the run continues."""
    if WORKED in os.environ:
        mark_lines(name)
    if not flow_run.id:
        return
    number = UUID(str(flow_run.id))
    try:
        with get_client(sync_client=True) as client:
            if flow_run.name != name:
                client.update_flow_run(number, name=name)
            if folder is not None:
                client.update_flow_run_labels(number, {FOLDER: str(folder.resolve())})
    except httpx.HTTPError as error:
        print_error(f"warning: the Prefect server does not take the name {name}: {type(error).__name__}: {error}")


def name_of(folder: RunFolder) -> str:
    """NAME, or "NAME (try 2)" if the run's flow was started a second time (resumed by a person or after a crash), and
    so on."""
    tries = sum(one.what == "flow" for one in read_run(folder.path).attempts)
    return folder.path.name if tries < 2 else f"{folder.path.name} (try {tries})"
