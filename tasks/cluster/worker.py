"""A worker of a work pool of processes that can be stopped: its runs save a checkpoint and are scheduled again at once.

Prefect's own command kills the processes of its runs when it is stopped, and says nothing to the server. It also ends,
and kills them, after one refused request or some minutes without a server: this one logs the reason and goes on.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any
from uuid import UUID

import psutil
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry, Crashed, StateType
from prefect.workers.process import ProcessWorker

from engine.errors import BadInput, MetronomeError
from engine.run.logs import log_line
from tasks.cluster import watchdog
from tasks.cluster.services import HEARTBEAT_S

GRACE_S = 50.0
"""Seconds that runs have to save and end, less than the 60 s that infra/compose gives its worker."""
POLL_S = 0.5
ASK_S = 5.0
"""Seconds until the server is asked again for a run of which it did not tell."""
_FLOW_RUN = "PREFECT__FLOW_RUN_ID"
_WENT_ON = (StateType.COMPLETED, StateType.FAILED, StateType.CANCELLED, StateType.CANCELLING, StateType.SCHEDULED)


def run_worker(pool: str, name: str, *, limit: int, grace_s: float, healthcheck: bool) -> None:
    """Work until SIGTERM or Ctrl-C. Then end the runs by SIGTERM, wait for at most `grace_s` seconds, and schedule
    those with the tag `resumable` again. `healthcheck`: answer /health, as Prefect's worker does. Raises BadInput for
    a pool that is not there, or not of type process; MetronomeError, once its runs are scheduled again, for a worker
    that has ended by itself."""
    with get_client(sync_client=True) as client:
        try:
            kind = client.read_work_pool(pool).type
        except ObjectNotFound:
            raise BadInput(f"no work pool {pool} on the Prefect server: metronome deploy creates it") from None
    if kind != watchdog.PROCESS:
        raise BadInput(f"work pool {pool} is of type {kind}: start its worker by prefect worker start --pool {pool}")
    worker = ProcessWorker(work_pool_name=pool, name=name or None, limit=limit or None)
    stopped, reason = asyncio.run(_work(worker, grace_s, healthcheck))
    reschedule_stopped(stopped)
    if reason:
        raise MetronomeError(f"the worker of pool {pool} has ended by itself: {reason}")


class Tried:
    """A call that never fails: an error is logged with its reason, once for as long as that stays the same."""

    def __init__(self, what: str, call: Callable[..., Awaitable[Any]]) -> None:
        """`what` names the call in the log."""
        self._what = what
        self._call = call
        self._said = ""

    async def __call__(self, *given: Any) -> Any:  # noqa: ANN401
        """What the call returns; None after an error."""
        try:
            found = await self._call(*given)
        except Exception as error:
            reason = _reason(error)
            if reason != self._said:
                log_line(f"{self._what} has failed, the worker goes on: {reason}")
            self._said = reason
            return None
        if self._said:
            log_line(f"{self._what} succeeds again")
        self._said = ""
        return found


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def keep_going(worker: ProcessWorker, stops: asyncio.Event) -> None:
    """Let no request of the worker to its server end it, and with it its runs. What has failed is tried again when the
    worker asks next: for runs each PREFECT_WORKER_QUERY_SECONDS. Once it `stops`, it takes no run more, which would be
    ended at once; those that are not resumable would be lost."""
    ask = worker.get_and_submit_flow_runs
    start = worker._submit_run

    async def ask_or_stop() -> list[FlowRun]:
        return [] if stops.is_set() else await ask()

    async def start_or_leave(run: FlowRun) -> None:
        try:
            await start(run)
        except Exception:
            worker._submitting_flow_run_ids.discard(run.id)  # or it is never taken again
            worker._release_limit_slot(run.id)
            raise

    for name, what, call in (
        ("get_and_submit_flow_runs", "asking for runs", ask_or_stop),
        ("_sync_and_initialize", "telling the server of the worker", worker._sync_and_initialize),
        ("_submit_run", "starting a run", start_or_leave),
        ("_cancel_run", "cancelling a run that has not begun", worker._cancel_run),
    ):
        setattr(worker, name, Tried(what, call))


async def _work(worker: ProcessWorker, grace_s: float, healthcheck: bool) -> tuple[set[UUID], str]:
    """Run the worker; returns the flow runs that were stopped with it, and why it has ended by itself, if it has."""
    asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    keep_going(worker, asked)
    flows: dict[psutil.Process, UUID] = {}
    working = asyncio.create_task(worker.start(printer=log_line, with_healthcheck=healthcheck))
    stopping = asyncio.create_task(asked.wait())
    vouching = asyncio.create_task(_vouch(worker, flows))
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    reason = ""
    if working.done():
        error = working.exception()
        reason = _reason(error) if error else "no reason given"
    log_line(f"{reason or 'stopping'}: the runs save a checkpoint, for up to {grace_s:g} s")
    stopped = set(flows.values())
    stopped |= await Tried("ending the runs", _end_flows)(grace_s) or set()
    for task in (working, stopping, vouching):
        task.cancel()
    for ended in await asyncio.gather(working, stopping, vouching, return_exceptions=True):
        if isinstance(ended, Exception) and not reason:
            log_line(f"the end of the worker: {_reason(ended)}")
    return stopped, reason


async def _vouch(worker: ProcessWorker, flows: dict[psutil.Process, UUID]) -> None:
    """Send the heartbeats of runs that have not begun and whose processes live: a slow machine loads their libraries
    for minutes, and no other sign tells them from runs whose worker died when it took them. `flows` is kept up to date:
    the runs of the worker, and those that it had when it began to end."""
    vouch: dict[psutil.Process, Tried] = {}
    due: dict[psutil.Process, float] = {}

    async def look() -> None:
        living = dict(_living_flows())
        if worker.is_setup:
            flows.clear()
            flows.update(living)
        for child in vouch.keys() - living.keys():
            del vouch[child]
            due.pop(child, None)
        for child, number in living.items():
            tried = vouch.setdefault(child, Tried(f"the heartbeat of flow run {number}", ask))
            if due.get(child, 0.0) <= time.monotonic():
                await tried(child, number)

    async def ask(child: psutil.Process, number: UUID) -> None:
        due[child] = time.monotonic() + ASK_S  # after an error
        try:
            run = await worker.client.read_flow_run(number)
        except ObjectNotFound:  # deleted
            due[child] = math.inf
            return
        state = run.state.type if run.state else None
        waits = state == StateType.PENDING and time.time() - child.create_time() < watchdog.PENDING_S
        # one more when it runs, since the event of its beginning may be lost
        if waits or state == StateType.RUNNING:
            watchdog.send_heartbeat(run, worker.work_pool)
        due[child] = time.monotonic() + HEARTBEAT_S if waits else math.inf

    looks = Tried("looking for the processes of runs", look)
    while True:
        await asyncio.sleep(POLL_S)
        await looks()


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
    """Schedule the flow runs again that their worker's end has interrupted. One for which the server refuses or does
    not answer is left to its automations and to the watchdog, and said so."""
    for number in numbers:
        try:
            _reschedule(number)
        except Exception as error:
            log_line(f"flow run {number} is left to the server's automations, which resume it: {_reason(error)}")


def _reschedule(number: UUID) -> None:
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(number)
        if run.state is None or run.state.type in _WENT_ON or watchdog.TAG not in run.tags:
            return
        if run.state.type != StateType.CRASHED:
            client.set_flow_run_state(run.id, Crashed(message="Its worker was stopped"))
        client.set_flow_run_state(run.id, AwaitingRetry(message="Its worker was stopped; another one resumes it"))
        log_line(f"{run.name} is scheduled again")
