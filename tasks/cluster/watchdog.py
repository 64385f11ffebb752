"""Automations of the Prefect server that bring crashed runs back: nobody has to be awake.

A worker reports a flow process that died as Crashed; where the worker died too, its silence does (flow heartbeats). A
crashed run is scheduled again as the same flow run, which goes on where its run folder says (flows.pipeline). They act
on flow runs with the tag `resumable` only: deployments carry it.

Automations hear events, and a server that is killed or whose database is locked may lose one. The watchdog
(`python -m tasks.cluster.watchdog`) beside the server looks every minute for crashed runs that no automation has
brought back; `make services` and infra/compose run it.
"""

from __future__ import annotations

import argparse
import time
from datetime import UTC, datetime, timedelta

import httpx
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from prefect.states import AwaitingRetry, StateType

TAG = "resumable"
"""Tag of deployments whose crashed runs are to be scheduled again."""
SILENCE_S = 300.0
"""Silence after which a flow run is taken for dead: longer than a Prefect server takes to be back."""
PENDING_S = 2400.0
"""After which a run that was handed to a worker and did not begin is taken for dead: its worker's node was lost in that
moment. Longer than a pod may wait for its image and its NPUs (pod_watch_timeout_seconds in infra/pools)."""
DELAY_S = 30.0
"""How long a crashed run rests before it is scheduled again. A worker reports a death twice, up to 15 s apart; the
second report would crash a run that is scheduled again between them, and a second process be started for it."""
CRASHES = 10
"""So many starts within `CRASHES_WITHIN_S` end a run that dies before it can count
its attempts itself (run.resumes)."""
CRASHES_WITHIN_S = 1800.0

SWEEP_S = 60.0
"""Seconds between looks for crashed runs that no automation has brought back."""
FORGOTTEN_S = 3600.0
"""A run that crashed longer ago is left to people."""

_RUNS = {"prefect.resource.id": "prefect.flow-run.*"}
_OURS = {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"}
_ENDS = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelling", "Cancelled", "Crashed")}
"""What a run that ended, or that somebody ends, says: one that is being cancelled must not come back as crashed."""
_BEGUN = {
    f"prefect.flow-run.{sign}"
    for sign in ("Running", "heartbeat", "Scheduled", "AwaitingRetry", "AwaitingConcurrencySlot")
}
"""Any of them says that a run that was handed to a worker began, or was taken back: one event may be lost."""
_LEFT = {
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
"""A run that is no longer crashed: somebody has scheduled it, say."""


def install(delay_s: float = DELAY_S, silence_s: float = SILENCE_S, crashes: int = CRASHES) -> list[str]:
    """Create the automations on the server that PREFECT_API_URL names, or bring them up to date; their names."""
    wanted = automations(delay_s, silence_s, crashes)
    for automation in wanted:
        try:
            automation.id = Automation.read(name=automation.name).id
        except (ValueError, ObjectNotFound):
            automation.create()
        else:
            automation.update()
    return [automation.name for automation in wanted]


def automations(delay_s: float = DELAY_S, silence_s: float = SILENCE_S, crashes: int = CRASHES) -> list[Automation]:
    """What `install` creates. `silence_s` must be longer than two heartbeats; `crashes`:
    bound on starts in half an hour."""
    return [_resume(delay_s), _silent(silence_s), _not_begun(), _loop(crashes)]


def _resume(delay_s: float) -> Automation:
    return Automation(
        name="metronome: resume a crashed run",
        description="A run whose process died is scheduled again; it goes on from its last published checkpoint.",
        trigger=EventTrigger(
            after={"prefect.flow-run.Crashed"},
            expect=_LEFT,
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
        description=f"A run whose flow sent no heartbeat for {silence_s:.0f} s, nor ended, is taken for crashed.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", *_ENDS},
            match=_RUNS,
            match_related=_OURS,
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=silence_s),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=f"No heartbeat for {silence_s:.0f} s")],
    )


def _not_begun() -> Automation:
    """A run sends its first heartbeat when it begins: until then its silence says nothing."""
    return Automation(
        name="metronome: a run does not begin",
        description=f"A run that a worker took and that did not begin within {PENDING_S / 60:.0f} minutes is taken for "
        "crashed.",
        trigger=EventTrigger(
            after={"prefect.flow-run.Pending"},
            expect=_BEGUN | _ENDS,
            match=_RUNS,
            match_related=_OURS,
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=PENDING_S),
        ),
        actions=[
            ChangeFlowRunState(state=StateType.CRASHED, message=f"Did not begin within {PENDING_S / 60:.0f} minutes")
        ],
    )


def _loop(crashes: int) -> Automation:
    """A run that gets as far as its run folder ends itself before this one acts."""
    often = f"Crashed {crashes - 1} times in {CRASHES_WITHIN_S / 60:.0f} minutes"
    message = f"{often}: not resumed any more; see the worker's log"
    return Automation(
        name="metronome: a run crashes again and again",
        description="A run that can't even start (its code can't be imported, say) ends as failed.",
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


def sweep(older_than_s: float = 2 * DELAY_S) -> list[str]:
    """Schedule crashed runs again that have been crashed for longer than the automation takes; their names."""
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


def _ask() -> None:
    """Raises httpx.HTTPError while the server is away:
    Prefect's client says so by a bare RuntimeError the first time."""
    httpx.get(f"{get_current_settings().api.url}/health", timeout=30).raise_for_status()


def main() -> None:
    """Sweep for ever; a server that is away is looked for again."""
    parser = argparse.ArgumentParser(description="schedules crashed runs again that no automation has brought back")
    parser.add_argument(
        "--every", type=float, default=SWEEP_S, metavar="SECONDS", help="between looks (default: %(default)s)"
    )
    parser.add_argument(
        "--after",
        type=float,
        default=2 * DELAY_S,
        metavar="SECONDS",
        help="that a run has been crashed (default: %(default)s, longer than the automation takes)",
    )
    arguments = parser.parse_args()
    while True:
        try:
            _ask()
            for name in sweep(arguments.after):
                print(f"resumed {name}", flush=True)
        except (httpx.HTTPError, ObjectNotFound) as error:  # away, or the run was deleted meanwhile
            print(f"the Prefect server does not answer as it should: {type(error).__name__}: {error}", flush=True)
        time.sleep(arguments.every)


if __name__ == "__main__":
    main()
