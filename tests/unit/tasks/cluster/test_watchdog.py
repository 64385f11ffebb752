"""Which events the automations answer, asked of the Prefect server's own triggers;
tests/stack/test_silent_runs.py fires them. Which runs the watchdog resumes."""

from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from uuid import uuid4

import pytest
import yaml
from prefect.server.events.schemas.automations import EventTrigger
from prefect.server.events.schemas.events import ReceivedEvent

from tasks.cluster import watchdog
from tasks.cluster.deploy import FILE, read_template
from tasks.cluster.services import HEARTBEAT_S
from tasks.cluster.watchdog import (
    FORGOTTEN_S,
    PENDING_S,
    SILENCE_S,
    TAG,
    build_automations,
    crash_late,
    reschedule_crashed,
)

SILENT = "metronome: a run is silent"
NOT_BEGUN = "metronome: a run does not begin"
NO_PROCESS = "metronome: a process does not begin"


def trigger(name):
    """As the server keeps it."""
    [found] = [one for one in build_automations() if one.name == name]
    return EventTrigger.model_validate(found.trigger.model_dump(exclude={"id"}))


def event(what, *tags, pool="process"):
    related = [
        {"prefect.resource.id": "prefect.work-pool.1", "prefect.resource.role": "work-pool"}
        | {"prefect.work-pool.type": pool}
    ]
    related += [{"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"} for tag in tags]
    return ReceivedEvent(
        id=uuid4(),
        occurred=datetime.now(UTC),
        event=f"prefect.flow-run.{what}",
        resource={"prefect.resource.id": f"prefect.flow-run.{uuid4()}"},
        related=related,
    )


@pytest.mark.parametrize("name", [one.name for one in build_automations()])
def test_only_runs_that_are_to_be_resumed_are_watched(name):
    what = "Pending" if name == "metronome: a run crashes again and again" else "Cancelled"
    pool = "kubernetes" if name == NOT_BEGUN else "process"
    assert trigger(name).covers(event(what, "nightly", TAG, pool=pool))
    assert not trigger(name).covers(event(what, "nightly", pool=pool))


def test_only_a_pod_may_wait_long_before_its_run_begins():
    """A worker that is killed just after it took a run leaves it pending."""
    for pool in ("process", "kubernetes", "docker"):
        taken = event("Pending", TAG, pool=pool)
        watching = [name for name in (NOT_BEGUN, NO_PROCESS) if trigger(name).covers(taken)]
        assert watching == [NO_PROCESS if pool == "process" else NOT_BEGUN]
    _, pods = read_template("kubernetes-ascend-train")
    pod_waits_s = pods["variables"]["properties"]["pod_watch_timeout_seconds"]["default"]
    assert trigger(NOT_BEGUN).within.total_seconds() > pod_waits_s
    assert trigger(NO_PROCESS).within == trigger(SILENT).within


def test_a_run_keeps_its_slot_until_it_begins_or_is_taken_for_dead():
    """Prefect cancels a run whose slot was given to another one before it began."""
    limits = [
        one["concurrency_limit"]
        for one in yaml.safe_load(FILE.read_text())["deployments"]
        if "concurrency_limit" in one
    ]
    assert len(limits) == 3
    assert {one["grace_period_seconds"] for one in limits} == {PENDING_S + SILENCE_S}


@pytest.mark.parametrize(("name", "begins"), [(SILENT, "heartbeat"), (NOT_BEGUN, "Pending"), (NO_PROCESS, "Pending")])
def test_a_run_that_ends_or_is_being_cancelled_is_not_taken_for_crashed(name, begins):
    watched = trigger(name)
    assert watched.starts_after(f"prefect.flow-run.{begins}")
    for end in ("Completed", "Failed", "Crashed", "Cancelling", "Cancelled"):
        assert watched.expects(f"prefect.flow-run.{end}"), end
        assert not watched.starts_after(f"prefect.flow-run.{end}"), end


def test_silence_is_longer_than_two_heartbeats_and_each_begins_it_anew():
    watched = trigger(SILENT)
    assert watched.starts_after("prefect.flow-run.heartbeat")
    assert watched.expects("prefect.flow-run.heartbeat")
    assert watched.within.total_seconds() > 2 * HEARTBEAT_S


@pytest.mark.parametrize("name", [NOT_BEGUN, NO_PROCESS])
@pytest.mark.parametrize("sign", ["Running", "heartbeat", "Scheduled", "AwaitingRetry", "AwaitingConcurrencySlot"])
def test_a_run_has_begun_or_was_taken_back_by_any_sign_of_it(name, sign):
    """The event Running alone may be lost: a healthy run would be set to Crashed."""
    watched = trigger(name)
    assert watched.expects(f"prefect.flow-run.{sign}")
    assert not watched.starts_after(f"prefect.flow-run.{sign}")


def test_a_workers_heartbeat_of_a_run_is_a_sign_of_its_life_until_the_next(monkeypatch):
    sent = []
    monkeypatch.setattr(watchdog, "emit_event", lambda **event: sent.append(event))
    run = SimpleNamespace(id=uuid4(), name="night", tags=["nightly", TAG])
    watchdog.send_heartbeat(run, SimpleNamespace(id=uuid4(), name="cpu", type="process"))
    [event] = sent
    received = ReceivedEvent.model_validate(
        event | {"id": uuid4(), "occurred": datetime.now(UTC), "related": [one.root for one in event["related"]]}
    )
    assert received.resource.id == f"prefect.flow-run.{run.id}"
    for name in (SILENT, NO_PROCESS):
        assert trigger(name).covers(received)
        assert trigger(name).expects(received.event)
    assert trigger(SILENT).starts_after(received.event)


class Server:
    """Takes the place of the Prefect server's client: flow runs, found by the filters that the watchdog sends."""

    def __init__(self, runs, heartbeats=None):
        """`heartbeats`: seconds since the last one, by run."""
        self.runs = runs
        self.heartbeats = heartbeats or {}
        self.resumed = []

    def read_flow_runs(self, flow_run_filter):
        wanted = flow_run_filter.model_dump(exclude_none=True)
        tags = wanted.get("tags", {"all_": []})["all_"]
        ended = wanted.get("end_time", {})
        return [
            run
            for run in self.runs
            if run.state_type in wanted["state"]["type"]["any_"]
            and set(tags) <= run.tags
            and (not ended or ended["after_"] <= run.end_time <= ended["before_"])
        ]

    def read_work_pools(self):
        return [SimpleNamespace(name="cpu", type="process"), SimpleNamespace(name="cluster", type="kubernetes")]

    def read_events(self, wanted, limit):
        assert wanted.event.name == ["prefect.flow-run.heartbeat"]
        [run] = wanted.resource.id
        before_s = self.heartbeats.get(run.removeprefix("prefect.flow-run."))
        heard = before_s is not None and wanted.occurred.since < datetime.now(UTC) - timedelta(seconds=before_s)
        return SimpleNamespace(events=["a heartbeat"] if heard else [])

    def set_flow_run_state(self, run, state):
        self.resumed.append((run, state.type, state.name))


def crashed(name, before_s=120.0, **changes):
    settings = {"id": name, "name": name, "tags": {TAG, "nightly"}, "state_type": "CRASHED", "deployment_id": "ours"}
    return SimpleNamespace(**settings | changes, end_time=datetime.now(UTC) - timedelta(seconds=before_s))


def test_the_watchdog_resumes_the_crashed_runs_that_are_to_be_resumed_and_that_no_automation_has(monkeypatch):
    server = Server(
        [
            crashed("forgotten by the automations"),
            crashed("an automation may still resume it", before_s=50.0),
            crashed("given up", before_s=FORGOTTEN_S + 60),
            crashed("of somebody else", tags={"nightly"}),
            crashed("failed", state_type="FAILED"),
            crashed("without a deployment, which no worker takes", deployment_id=None),
        ]
    )
    monkeypatch.setattr(watchdog, "get_client", lambda sync_client: nullcontext(server))
    assert reschedule_crashed() == ["forgotten by the automations"]
    assert server.resumed == [("forgotten by the automations", "SCHEDULED", "AwaitingRetry")]
    assert reschedule_crashed(older_than_s=40.0) == [
        "forgotten by the automations",
        "an automation may still resume it",
    ]


def pending(name, pool, for_s, **changes):
    state = SimpleNamespace(timestamp=datetime.now(UTC) - timedelta(seconds=for_s))
    settings = {"id": name, "name": name, "tags": {TAG}, "state_type": "PENDING", "work_pool_name": pool}
    return SimpleNamespace(**settings | changes, state=state)


def test_the_watchdog_crashes_runs_that_did_not_begin_and_that_no_automation_has(monkeypatch):
    """The server may have lost the event, if it was killed when the worker took the run."""
    server = Server(
        [
            pending("of a dead worker", "cpu", SILENCE_S + 70),
            pending("an automation may still act", "cpu", SILENCE_S + 50),
            pending("still loads", "cpu", 4 * SILENCE_S),
            pending("loaded until its worker died", "cpu", 4 * SILENCE_S),
            pending("of a lost node", "cluster", PENDING_S + 70),
            pending("waits for NPUs", "cluster", PENDING_S - 60),
            pending("of somebody else", "cpu", PENDING_S + 70, tags={"nightly"}),
            pending("runs", "cpu", PENDING_S + 70, state_type="RUNNING"),
        ],
        heartbeats={"still loads": 20.0, "loaded until its worker died": SILENCE_S + 70},
    )
    monkeypatch.setattr(watchdog, "get_client", lambda sync_client: nullcontext(server))
    late = ["of a dead worker", "loaded until its worker died", "of a lost node"]
    assert crash_late() == late
    assert server.resumed == [(name, "CRASHED", "Crashed") for name in late]
