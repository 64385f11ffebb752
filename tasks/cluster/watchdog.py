"""Automations of the Prefect server that resume crashed runs without a person.

A worker reports a flow process that died as Crashed. If the worker died as well, the missing heartbeats of the flow
show it. A crashed run is rescheduled as the same flow run, which continues from its run folder (flows.pipeline). The
automations act only on flow runs with the tag `resumable`, which their deployments set.

Automations react to events, and a server that is killed, or whose database is locked, may lose an event. So the
watchdog (`python -m tasks.cluster.watchdog`) checks every minute for crashed runs that no automation has resumed, and
for runs that did not start in time. `make services` and infra/compose start it along with the server.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import httpx
from prefect.automations import Automation
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, WorkPool
from prefect.events import RelatedResource, emit_event
from prefect.events.actions import ChangeFlowRunState
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventResourceFilter
from prefect.events.related import tags_as_related_resources
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from prefect.states import AwaitingRetry, Crashed, StateType

from engine.run.logs import log_line
from engine.run.process import watch_lifeline

TAG = "resumable"
"""Tag of deployments whose crashed runs are rescheduled."""
SILENCE_S = 300.0
"""Seconds without a heartbeat after which a flow run counts as dead. A Prefect server restarts in less. In a work pool
of type process this holds from the moment that a worker takes the run: until the run begins, which takes minutes on a
slow machine, `metronome worker` sends its heartbeats for as long as its process lives (tasks.cluster.worker)."""
PENDING_S = 2400.0
"""Seconds within which a run of another work pool must begin after a worker took it; otherwise it counts as dead,
because the worker's node was lost at that moment. Longer than a pod may wait for its image and its NPUs
(pod_watch_timeout_seconds in infra/pools). A worker sends heartbeats of a process that does not begin for no longer."""
PROCESS = "process"
"""Type of the work pools whose workers start runs as processes on their own node."""
DELAY_S = 30.0
"""Seconds between a crash and the rescheduling. A worker reports a death twice, up to 15 s apart. If the run were
rescheduled in between, the second report would crash it again, and a second process would be started for it."""
CRASHES = 10
"""Number of starts within `CRASHES_WITHIN_S` that end a run if it dies before it can count its attempts
(run.resumes).
"""
CRASHES_WITHIN_S = 1800.0

SWEEP_S = 60.0
"""Seconds between two checks for crashed runs that no automation has resumed."""
FORGOTTEN_S = 3600.0
"""Seconds after a crash during which the watchdog resumes a run."""

HEARTBEAT = "prefect.flow-run.heartbeat"
_RUNS = {"prefect.resource.id": "prefect.flow-run.*"}
_OURS = {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"}
_PROCESSES = {"prefect.resource.role": "work-pool", "prefect.work-pool.type": PROCESS}
_NO_PROCESSES = {"prefect.resource.role": "work-pool", "prefect.work-pool.type": f"!{PROCESS}"}
_ENDS = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelling", "Cancelled", "Crashed")}
"""Events of a run that has ended or is being cancelled. A cancelled run must not be resumed as a crashed one."""
_BEGUN = {
    f"prefect.flow-run.{sign}"
    for sign in ("Running", "heartbeat", "Scheduled", "AwaitingRetry", "AwaitingConcurrencySlot")
}
"""Each of these events says that a run began on its worker, is about to, or was taken back. There are several because
one may be lost."""
LEFT = {
    f"prefect.flow-run.{state}"
    for state in (
        "Scheduled",
        "AwaitingRetry",
        "Pending",
        "Submitting",
        "Running",
        "Cancelling",
        "Cancelled",
        "Completed",
        "Failed",
    )
}
"""Events of a run that is no longer crashed, for example because a person has scheduled it."""


def install_automations(delay_s: float = DELAY_S, silence_s: float = SILENCE_S, crashes: int = CRASHES) -> list[str]:
    """Create or update the automations on the server that PREFECT_API_URL names; returns their names."""
    return install(build_automations(delay_s, silence_s, crashes))


def install(wanted: Sequence[Automation]) -> list[str]:
    """Create or update automations, by their names; returns these."""
    for automation in wanted:
        try:
            automation.id = Automation.read(name=automation.name).id
        except (ValueError, ObjectNotFound):
            automation.create()
        else:
            automation.update()
    return [automation.name for automation in wanted]


def build_automations(
    delay_s: float = DELAY_S, silence_s: float = SILENCE_S, crashes: int = CRASHES
) -> list[Automation]:
    """The automations that `install_automations` creates.

    `delay_s`: seconds before a resume; `silence_s`: without a sign of life, must be longer than two heartbeats;
    `crashes`: the limit of starts in half an hour.
    """
    return [
        _resume(delay_s),
        _silent(silence_s),
        _not_begun("metronome: a run does not begin", _NO_PROCESSES, PENDING_S),
        _not_begun("metronome: a process does not begin", _PROCESSES, silence_s),
        _loop(crashes),
    ]


def _resume(delay_s: float) -> Automation:
    return Automation(
        name="metronome: resume a crashed run",
        description="A run whose process died is scheduled again; it continues from its last complete checkpoint.",
        trigger=EventTrigger(
            after={"prefect.flow-run.Crashed"},
            expect=LEFT,
            match=_RUNS,
            match_related=_OURS,
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=delay_s),
        ),
        actions=[ChangeFlowRunState(state=StateType.SCHEDULED, name="AwaitingRetry", message="Resumed after a crash")],
    )


def _silent(silence_s: float) -> Automation:
    return Automation(
        name="metronome: a run is silent",
        description=f"A run that has not ended and sent no heartbeat for {silence_s:.0f} s counts as crashed.",
        trigger=EventTrigger(
            after={HEARTBEAT},
            expect={HEARTBEAT, *_ENDS},
            match=_RUNS,
            match_related=_OURS,
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=silence_s),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=f"No heartbeat for {silence_s:.0f} s")],
    )


def _not_begun(name: str, pools: dict[str, str], within_s: float) -> Automation:
    """Mark a run as crashed that does not begin. `_silent` waits for a first heartbeat, so it cannot act earlier."""
    return Automation(
        name=name,
        description=f"A run that a worker took and that did not start within {within_s:.0f} s counts as crashed.",
        trigger=EventTrigger(
            after={"prefect.flow-run.Pending"},
            expect=_BEGUN | _ENDS,
            match=_RUNS,
            match_related=[_OURS, pools],
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=within_s),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=_late(within_s))],
    )


def _late(within_s: float) -> str:
    return f"Did not start within {within_s:.0f} s"


def _loop(crashes: int) -> Automation:
    """End a run that crashes again and again. A run that reaches its run folder counts its attempts itself and ends
    before this automation acts."""
    often = f"Crashed {crashes - 1} times in {CRASHES_WITHIN_S / 60:.0f} minutes"
    message = f"{often}: not resumed again; see the worker's log"
    return Automation(
        name="metronome: a run crashes again and again",
        description="A run that cannot start (for example because its code cannot be imported) ends as failed.",
        trigger=EventTrigger(
            expect={"prefect.flow-run.Pending"},
            match=_RUNS,
            match_related=_OURS,
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=crashes,
            within=timedelta(seconds=CRASHES_WITHIN_S),
        ),
        actions=[ChangeFlowRunState(state=StateType.FAILED, message=message)],
    )


def reschedule_crashed(older_than_s: float = 2 * DELAY_S) -> list[str]:
    """Reschedule the runs that crashed between `older_than_s` and `FORGOTTEN_S` seconds ago; returns their names."""
    now = datetime.now(UTC)
    window = FlowRunFilterEndTime(
        after_=now - timedelta(seconds=FORGOTTEN_S), before_=now - timedelta(seconds=older_than_s)
    )
    crashed = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED]))
    wanted = FlowRunFilter(state=crashed, tags=FlowRunFilterTags(all_=[TAG]), end_time=window)
    resumed = []
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=wanted):
            if run.deployment_id:
                client.set_flow_run_state(run.id, AwaitingRetry(message="Resumed after a crash, by the watchdog"))
                resumed.append(run.name)
    return resumed


def crash_late(older_than_s: float = 2 * DELAY_S) -> list[str]:
    """Set runs to Crashed that should have begun at least `older_than_s` seconds ago; returns their names."""
    pending = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PENDING]))
    wanted = FlowRunFilter(state=pending, tags=FlowRunFilterTags(all_=[TAG]))
    late = []
    with get_client(sync_client=True) as client:
        processes = {pool.name for pool in client.read_work_pools() if pool.type == PROCESS}
        for run in client.read_flow_runs(flow_run_filter=wanted):
            within_s = SILENCE_S if run.work_pool_name in processes else PENDING_S
            since = datetime.now(UTC) - timedelta(seconds=within_s + older_than_s)
            if run.state and run.state.timestamp < since and not _has_heartbeat(client, run.id, since):
                client.set_flow_run_state(run.id, Crashed(message=f"{_late(within_s)}, says the watchdog"))
                late.append(run.name)
    return late


def _has_heartbeat(client: SyncPrefectClient, run: UUID, since: datetime) -> bool:
    """Whether the server has a heartbeat of the run since then."""
    wanted = EventFilter(
        event=EventNameFilter(name=[HEARTBEAT]),
        resource=EventResourceFilter(id=[f"prefect.flow-run.{run}"]),
        occurred=EventOccurredFilter(since=since),
    )
    return bool(client.read_events(wanted, limit=1).events)


def send_heartbeat(run: FlowRun, pool: WorkPool) -> None:
    """Send a heartbeat of a run for it, with what the automations match."""
    pool_labels = {"prefect.resource.id": f"prefect.work-pool.{pool.id}", "prefect.resource.role": "work-pool"}
    emit_event(
        event=HEARTBEAT,
        resource={"prefect.resource.id": f"prefect.flow-run.{run.id}", "prefect.resource.name": run.name},
        related=[
            RelatedResource(pool_labels | {"prefect.resource.name": pool.name, "prefect.work-pool.type": pool.type}),
            *tags_as_related_resources(run.tags),
        ],
    )


def _ask() -> None:
    """Raise httpx.HTTPError while the server does not answer. (Prefect's own client raises a bare RuntimeError the
    first time.)"""
    httpx.get(f"{get_current_settings().api.url}/health", timeout=30).raise_for_status()


def main() -> None:
    """Sweep forever. While the server does not answer, keep trying."""
    watch_lifeline()
    parser = argparse.ArgumentParser(description="reschedules crashed runs that no automation has resumed")
    parser.add_argument(
        "--every", type=float, default=SWEEP_S, metavar="SECONDS", help="between two checks (default: %(default)s)"
    )
    parser.add_argument(
        "--after",
        type=float,
        default=2 * DELAY_S,
        metavar="SECONDS",
        help="for which a run must have been crashed or late (default: %(default)s, longer than an automation takes)",
    )
    parser.add_argument(
        "--alive", type=Path, metavar="FILE", help="touched after each check, by which others see that it works"
    )
    arguments = parser.parse_args()
    while True:
        try:
            _ask()
            for name in crash_late(arguments.after):
                log_line(f"{name} did not start in time")
            for name in reschedule_crashed(arguments.after):
                log_line(f"resumed {name}")
        # no answer, an invalid one (a proxy's page: ValueError), or the run was deleted in between
        except (httpx.HTTPError, ObjectNotFound, ValueError) as error:
            log_line(f"the Prefect server does not answer as it should: {type(error).__name__}: {error}")
        if arguments.alive is not None:
            arguments.alive.touch()
        time.sleep(arguments.every)


if __name__ == "__main__":
    main()
