"""Resumes crashed runs without a person: `python -m tasks.cluster.watchdog`.

Prefect retries what fails inside a flow run. Between flow runs the watchdog is the way back. Every half minute it asks
the server for flow runs with the tag `resumable`, which their deployments set:

- A run that sends no more heartbeats, or that a worker took and that does not begin, is set to Crashed.
- A run that crashed is scheduled again as the same flow run, which continues from its run folder (flows.pipeline). It
  ends as Failed if it was started too often within half an hour.

The watchdog keeps nothing, so it may be killed and started again. `make services`, infra/compose, infra/kubernetes and
infra/systemd start it along with the server.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun
from prefect.events.filters import EventFilter, EventNameFilter, EventResourceFilter
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from prefect.states import AwaitingRetry, Crashed, Failed, StateType
from prefect.variables import Variable

from engine.run.logs import log_line
from engine.run.process import watch_lifeline

TAG = "resumable"
"""Tag of deployments whose crashed runs are resumed."""
HEARTBEAT_S = 30
"""PREFECT_FLOWS_HEARTBEAT_FREQUENCY of flow runs, which infra/ sets. It is the shortest value that Prefect allows; its
default is 180."""
SILENCE_S = 300.0
"""Seconds without a heartbeat after which a running flow run counts as dead, if the server has answered for as long. A
Prefect server restarts in less."""
PENDING_S = 2400.0
"""Seconds within which a run must begin after a worker took it; otherwise it counts as dead, because the worker was
lost at that moment."""
POD_S = 86400.0
"""The same where Kubernetes has a job for the run, which may wait for its devices or its image, as a second job
would."""
DELAY_S = 30.0
"""Seconds between a crash and the resume. A worker reports a death twice, up to 15 s apart. If the run were resumed in
between, the second report would crash it again, and a second process would be started for it."""
STARTS = 10
"""Number of starts within `STARTS_WITHIN_S` after which a run ends that dies before it can count its attempts
(run.resumes)."""
STARTS_WITHIN_S = 1800.0
FORGOTTEN_S = 3600.0
"""Seconds after a crash during which a run is resumed."""
SEEN = "metronome_watchdog"
"""Prefect variable with the time of the last look, by which a deploy sees that somebody looks."""


@dataclass(frozen=True)
class Limits:
    """When a run counts as dead, and when it is resumed. Times in seconds."""

    delay_s: float = DELAY_S
    silence_s: float = SILENCE_S
    pending_s: float = PENDING_S
    starts: int = STARTS


def sweep(limits: Limits, *, judge_silence: bool = True) -> list[str]:
    """Look once at all runs; returns what was done, one line for each run. Without `judge_silence` no run is taken for
    dead that sends no heartbeats."""
    with get_client(sync_client=True) as client:
        done = [*_crash_late(client, limits.pending_s)]
        if judge_silence:
            done += _crash_silent(client, limits.silence_s)
        done += _resume_crashed(client, limits)
    Variable.set(SEEN, datetime.now(UTC).isoformat(), overwrite=True)
    return done


def last_seen() -> float | None:
    """Seconds since a watchdog last looked at the server's runs; None if none ever has."""
    seen = Variable.get(SEEN)
    return None if seen is None else (datetime.now(UTC) - datetime.fromisoformat(str(seen))).total_seconds()


def _crash_late(client: SyncPrefectClient, pending_s: float) -> list[str]:
    """Set runs to Crashed that a worker took long ago and that have not begun."""
    late = []
    for run in _runs(client, StateType.PENDING):
        limit = max(pending_s, POD_S) if _has_job(run) else pending_s
        if run.state and run.state.timestamp < _ago(limit):
            client.set_flow_run_state(run.id, Crashed(message=f"Did not start within {limit:.0f} s"))
            late.append(f"{run.name} did not start in time")
    return late


def _has_job(run: FlowRun) -> bool:
    """Whether Prefect's worker has made a job for the run, NAMESPACE:JOB, instead of a process, HOST:PID."""
    name = (run.infrastructure_pid or "").rpartition(":")[2]
    return bool(name) and not name.isdigit()


def _crash_silent(client: SyncPrefectClient, silence_s: float) -> list[str]:
    """Set runs to Crashed whose heartbeats have ended. A run that never sent one is left alone."""
    since = _ago(silence_s)
    silent = []
    for run in _runs(client, StateType.RUNNING):
        if run.state and run.state.timestamp < since:
            last = _last_heartbeat(client, run)
            if last is not None and last < since:
                client.set_flow_run_state(run.id, Crashed(message=f"No heartbeat for {silence_s:.0f} s"))
                silent.append(f"{run.name} sends no more heartbeats")
    return silent


def _resume_crashed(client: SyncPrefectClient, limits: Limits) -> list[str]:
    """Schedule crashed runs again, or end those that crash again and again."""
    window = FlowRunFilterEndTime(after_=_ago(FORGOTTEN_S), before_=_ago(limits.delay_s))
    done = []
    for run in _runs(client, StateType.CRASHED, window):
        if not run.deployment_id:  # no worker would take it
            continue
        states = client.read_flow_run_states(run.id)
        starts = sum(one.name == "Pending" and one.timestamp > _ago(STARTS_WITHIN_S) for one in states)
        if starts < limits.starts:
            client.set_flow_run_state(run.id, AwaitingRetry(message="Resumed after a crash"))
            done.append(f"resumed {run.name}")
        else:
            often = f"Started {starts} times in {STARTS_WITHIN_S / 60:.0f} minutes and crashed each time"
            message = f"{often}: not resumed again; see the worker's log"
            client.set_flow_run_state(run.id, Failed(message=message), force=True)
            done.append(f"{run.name} crashes again and again")
    return done


def _runs(client: SyncPrefectClient, state: StateType, ended: FlowRunFilterEndTime | None = None) -> Sequence[FlowRun]:
    wanted = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[state])),
        tags=FlowRunFilterTags(all_=[TAG]),
        end_time=ended,
    )
    return client.read_flow_runs(flow_run_filter=wanted)


def _last_heartbeat(client: SyncPrefectClient, run: FlowRun) -> datetime | None:
    wanted = EventFilter(
        event=EventNameFilter(name=["prefect.flow-run.heartbeat"]),
        resource=EventResourceFilter(id=[f"prefect.flow-run.{run.id}"]),
    )
    found = client.read_events(wanted, limit=1).events  # the newest first
    return found[0].occurred if found else None


def _ago(seconds: float) -> datetime:
    return datetime.now(UTC) - timedelta(seconds=seconds)


def main() -> None:
    """Look at the runs for ever. While the server does not answer, keep trying."""
    watch_lifeline()
    parser = argparse.ArgumentParser(description="resumes crashed runs")
    for option, default, what in (
        ("--every", 30.0, "between two looks"),
        ("--after", DELAY_S, "between a crash and the resume"),
        ("--silence", SILENCE_S, "without a heartbeat after which a run is dead"),
        ("--pending", PENDING_S, "within which a run must begin"),
    ):
        parser.add_argument(
            option, type=float, default=default, metavar="SECONDS", help=f"{what} (default: %(default)s)"
        )
    parser.add_argument(
        "--starts", type=int, default=STARTS, help="in half an hour that end a run (default: %(default)s)"
    )
    parser.add_argument(
        "--alive", type=Path, metavar="FILE", help="touched after each look, by which others see that it works"
    )
    given = parser.parse_args()
    limits = Limits(given.after, given.silence, given.pending, given.starts)
    answers_since: float | None = None
    while True:
        try:
            # Prefect's own client raises a bare RuntimeError while the server does not answer.
            httpx.get(f"{get_current_settings().api.url}/health", timeout=30).raise_for_status()
            answers_since = answers_since or time.monotonic()
            for line in sweep(limits, judge_silence=time.monotonic() - answers_since >= limits.silence_s):
                log_line(line)
        # no answer, an invalid one (a proxy's page: ValueError), or the run was deleted in between
        except (httpx.HTTPError, ObjectNotFound, ValueError) as error:
            answers_since = None
            log_line(f"the Prefect server does not answer as it should: {type(error).__name__}: {error}")
        if given.alive is not None:
            given.alive.touch()
        time.sleep(given.every)


if __name__ == "__main__":
    main()
