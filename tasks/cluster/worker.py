"""A worker of a work pool of processes that can be stopped: its runs save a checkpoint and are scheduled again at once.

Prefect's own command kills the processes of its runs when it is stopped, and says nothing to the server.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from uuid import UUID

import httpx
import psutil
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry, Crashed, StateType
from prefect.workers.process import ProcessWorker

from engine.errors import BadInput
from engine.run.logs import log_line
from tasks.cluster import watchdog
from tasks.cluster.services import HEARTBEAT_S

GRACE_S = 50.0
"""Seconds that runs have to save and end, less than the 60 s that infra/compose gives its worker."""
POLL_S = 0.5
_FLOW_RUN = "PREFECT__FLOW_RUN_ID"
_WENT_ON = (StateType.COMPLETED, StateType.FAILED, StateType.CANCELLED, StateType.CANCELLING, StateType.SCHEDULED)


def run_worker(pool: str, name: str, *, limit: int, grace_s: float, healthcheck: bool) -> None:
    """Work until SIGTERM or Ctrl-C. Then end the runs by SIGTERM, wait for at most `grace_s` seconds, and schedule
    those with the tag `resumable` again. `healthcheck`: answer /health, as Prefect's worker does. Raises BadInput for
    a pool that is not there, or not of type process."""
    with get_client(sync_client=True) as client:
        try:
            kind = client.read_work_pool(pool).type
        except ObjectNotFound:
            raise BadInput(f"no work pool {pool} on the Prefect server: metronome deploy creates it") from None
    if kind != watchdog.PROCESS:
        raise BadInput(f"work pool {pool} is of type {kind}: start its worker by prefect worker start --pool {pool}")
    worker = ProcessWorker(work_pool_name=pool, name=name or None, limit=limit or None)
    stopped = asyncio.run(_work(worker, grace_s, healthcheck))
    try:
        reschedule_stopped(stopped)
    except httpx.HTTPError as error:
        log_line(f"the Prefect server does not answer, so its automations resume the runs: {type(error).__name__}")


async def _work(worker: ProcessWorker, grace_s: float, healthcheck: bool) -> set[UUID]:
    """Run the worker; returns the flow runs that were stopped with it."""
    asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    working = asyncio.create_task(worker.start(printer=log_line, with_healthcheck=healthcheck))
    stopping = asyncio.create_task(asked.wait())
    vouching = asyncio.create_task(_vouch(worker))
    await asyncio.wait({working, stopping, vouching}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    vouching.cancel()
    if working.done():
        working.result()
        return set()
    log_line(f"stopping: the runs save a checkpoint, for up to {grace_s:g} s")
    stopped = await _end_flows(grace_s)
    working.cancel()
    for task in (working, vouching):
        with suppress(asyncio.CancelledError):
            await task
    return stopped


async def _vouch(worker: ProcessWorker) -> None:
    """Send the heartbeats of runs that have not begun and whose processes live: a slow machine loads their libraries
    for minutes, and no other sign tells them from runs whose worker died when it took them."""
    due: dict[psutil.Process, float] = {}
    while True:
        await asyncio.sleep(POLL_S)
        living = dict(_living_flows())
        due = {child: due.get(child, 0.0) for child in living}
        for child, number in living.items():
            if due[child] > time.monotonic():
                continue
            try:
                run = await worker.client.read_flow_run(number)
            except (httpx.HTTPError, ValueError):  # no answer, or a proxy's page: asked again
                continue
            except ObjectNotFound:  # deleted
                due[child] = math.inf
                continue
            state = run.state.type if run.state else None
            waits = state == StateType.PENDING and time.time() - child.create_time() < watchdog.PENDING_S
            # one more when it runs, since the event of its beginning may be lost
            if waits or state == StateType.RUNNING:
                watchdog.send_heartbeat(run, worker.work_pool)
            due[child] = time.monotonic() + HEARTBEAT_S if waits else math.inf


def _living_flows() -> Iterator[tuple[psutil.Process, UUID]]:
    """The processes of flow runs that this worker has started, with the flow runs."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            number = child.environ().get(_FLOW_RUN)
            if number is not None and child.status() != psutil.STATUS_ZOMBIE:
                yield child, UUID(number)


async def _end_flows(grace_s: float) -> set[UUID]:
    """End the processes of flow runs, also of one that begins meanwhile; returns the flow runs."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace_s
    told: dict[psutil.Process, UUID] = {}
    while loop.time() < deadline:
        living = dict(_living_flows())
        for child in living.keys() - told.keys():
            told[child] = living[child]
            with suppress(psutil.Error):
                child.terminate()
        if not living:
            break
        await asyncio.sleep(POLL_S)
    return set(told.values())


def reschedule_stopped(numbers: Iterable[UUID]) -> None:
    """Schedule the flow runs again that their worker's end has interrupted. Raises httpx.HTTPError."""
    with get_client(sync_client=True) as client:
        for number in numbers:
            run = client.read_flow_run(number)
            if run.state is None or run.state.type in _WENT_ON or watchdog.TAG not in run.tags:
                continue
            if run.state.type != StateType.CRASHED:
                client.set_flow_run_state(run.id, Crashed(message="Its worker was stopped"))
            client.set_flow_run_state(run.id, AwaitingRetry(message="Its worker was stopped; another one resumes it"))
            log_line(f"{run.name} is scheduled again")
