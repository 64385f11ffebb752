"""What a flow run shows in Prefect: its name and the label with its run's folder, the Logs tab, and the events to which
automations react."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.logging.handlers import APILogHandler, emit_api_log
from prefect.runtime import flow_run

from engine.errors import MetronomeError
from engine.run.folder import RunFolder
from engine.run.run_file import read_run
from tasks.terminal.console import heard_by, mark_lines, named_deployment, print_error

WORKED = "PREFECT__FLOW_RUN_ID"
"""Environment variable that a Prefect worker gives to the process of a flow run."""
FOLDER = "metronome.folder"
"""Label of a flow run with its run folder, by which an alert's command finds the logs from any place."""
LOGGER = "metronome"
"""Name of the logger in the Logs tab."""
TRAINED = "metronome.training.finished"
"""Event: a policy is trained and published."""
FINISHED = "metronome.run.finished"
"""Event: all stages of a run are done."""
CHAMPION = "metronome.champion.replaced"
"""Event: a run's policy became champion."""


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


class _Handler(APILogHandler):
    """Sends each record. (Prefect's own lines stay off, because each would be a request; see tasks/__init__.py.)"""

    def emit(self, record: logging.LogRecord) -> None:
        """Put the record into Prefect's queue, from which a thread sends several at once."""
        emit_api_log(self.prepare(record))


def shorten_line(record: logging.LogRecord) -> bool:
    """Filter of Prefect's own lines: without the count of retries, which has no meaningful end, and without "Crash
    detected!" where a signal ended the run, as a cancellation does; its state says so."""
    if isinstance(record.msg, str) and "Retry %s/%s" in record.msg and isinstance(record.args, tuple):
        record.msg = record.msg.replace("Retry %s/%s", "retry %s")
        record.args = (*record.args[:3], *record.args[4:])
    return not (str(record.msg).startswith("Crash detected!") and "signal" in str(record.msg))


@contextmanager
def send_output() -> Iterator[None]:
    """During the body, send Prefect everything that is printed, and the error that ends the body. At the end, the rest
    is sent within at most 5 s."""
    if not (number := flow_run.id):
        yield
        return
    for name in ("prefect.task_runs", "prefect.flow_runs"):
        logging.getLogger(name).addFilter(shorten_line)
    handler = _Handler()
    handler.setFormatter(logging.Formatter("%(message)s"))

    def send(level: int, text: str) -> None:
        record = logging.makeLogRecord({"name": LOGGER, "levelno": level, "msg": text, "flow_run_id": number})
        handler.handle(record)

    try:
        with heard_by(send):
            yield
    except MetronomeError as error:
        send(logging.ERROR, f"error: {error}")
        raise
    finally:
        handler.flush()


def training_finished(recipe: str, run: str, policy: Path, overrides: Sequence[str], pool_instances: int) -> None:
    """Emit the event that triggers the deployment `evaluate`, which reads its parameters from the payload."""
    emit_event(
        TRAINED,
        resource={
            "prefect.resource.id": f"metronome.run.{run}",
            "prefect.resource.name": run,
            "metronome.evaluation": named_deployment("evaluate"),
        },
        payload={
            "recipe": recipe,
            "run": run,
            "policy": str(policy.resolve()),
            "overrides": list(overrides),
            "on_rollout_pool": pool_instances,
        },
    )


def run_finished(folder: Path, figures: str, champion: str = "") -> None:
    """Emit the events of which alerts tell. `folder`: that of the run. `figures`: what the run reached, in a line.
    `champion`: the run's registered policy if it became champion."""
    run = folder.name
    resource = {"prefect.resource.id": f"metronome.run.{run}", "prefect.resource.name": run}
    payload = {
        "run": run,
        "folder": str(folder.resolve()),
        "figures": figures,
        "flow_run": str(flow_run.id),
        "policy": champion,
    }
    for event in (FINISHED, CHAMPION) if champion else (FINISHED,):
        emit_event(event, resource=resource, payload=payload)
