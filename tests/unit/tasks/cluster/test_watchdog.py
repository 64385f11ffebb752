"""Which runs the watchdog takes for dead, resumes and ends; tests/stack/test_silent_runs.py has a real server."""

from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
import yaml
from prefect.variables import Variable

from tasks.cluster import watchdog
from tasks.cluster.deploy import FILE, read_template
from tasks.cluster.watchdog import FORGOTTEN_S, HEARTBEAT_S, PENDING_S, SILENCE_S, STARTS, TAG, Limits, sweep


def before(seconds):
    return datetime.now(UTC) - timedelta(seconds=seconds)


class Server:
    """Takes the place of the Prefect server's client: flow runs, found by the filters that the watchdog sends."""

    def __init__(self, runs):
        self.runs = runs
        self.set = {}
        """(state, message) by run."""

    def read_flow_runs(self, flow_run_filter):
        wanted = flow_run_filter.model_dump(exclude_none=True)
        ended = wanted.get("end_time")
        return [
            run
            for run in self.runs
            if run.state_type in wanted["state"]["type"]["any_"]
            and {*wanted["tags"]["all_"]} <= run.tags
            and (not ended or ended["after_"] <= run.end_time <= ended["before_"])
        ]

    def read_flow_run_states(self, number):
        [run] = [one for one in self.runs if one.id == number]
        return [SimpleNamespace(name="Pending", timestamp=before(one)) for one in run.starts]

    def read_events(self, wanted, limit):
        assert (wanted.event.name, limit) == (["prefect.flow-run.heartbeat"], 1)
        [number] = wanted.resource.id
        [run] = [one for one in self.runs if f"prefect.flow-run.{one.id}" == number]
        return SimpleNamespace(events=[SimpleNamespace(occurred=before(one)) for one in run.heard[:1]])

    def set_flow_run_state(self, run, state, force=False):
        self.set[run] = (state.name, state.message)


def run(name, state, for_s=0.0, *, heard=(), starts=(), **changes):
    """A run that has been in a state for so long. `heard`, `starts`: seconds since its heartbeats, the newest first,
    and since a worker took it."""
    fields = {"id": name, "name": name, "tags": {TAG, "nightly"}, "deployment_id": "ours", "end_time": before(for_s)}
    own = SimpleNamespace(timestamp=before(for_s))
    return SimpleNamespace(**fields | changes, state_type=state, state=own, heard=heard, starts=starts)


@pytest.fixture
def swept(monkeypatch):
    """(state by run, lines) of one look at runs."""
    monkeypatch.setattr(Variable, "set", lambda *_, **__: None)

    def look(runs, **given):
        server = Server(runs)
        monkeypatch.setattr(watchdog, "get_client", lambda sync_client: nullcontext(server))
        lines = sweep(Limits(), **given)
        return {name: state for name, (state, _) in server.set.items()}, lines

    return look


def test_crashed_runs_are_resumed_within_an_hour_and_only_those_that_ask_for_it(swept):
    found, lines = swept(
        [
            run("crashed", "CRASHED", 60),
            run("may be reported a second time", "CRASHED", 15),
            run("given up", "CRASHED", FORGOTTEN_S + 60),
            run("of somebody else", "CRASHED", 60, tags={"nightly"}),
            run("failed", "FAILED", 60),
            run("cancelled", "CANCELLED", 60),
            run("without a deployment, which no worker takes", "CRASHED", 60, deployment_id=None),
        ]
    )
    assert found == {"crashed": "AwaitingRetry"}
    assert lines == ["resumed crashed"]


def test_a_run_that_crashes_again_and_again_is_ended(swept):
    found, lines = swept(
        [
            run("again and again", "CRASHED", 60, starts=range(60, 60 + STARTS)),
            run("once less", "CRASHED", 60, starts=range(60, 60 + STARTS - 1)),
            run("over hours", "CRASHED", 60, starts=range(0, 600 * STARTS, 600)),
        ]
    )
    assert found == {"again and again": "Failed", "once less": "AwaitingRetry", "over hours": "AwaitingRetry"}
    assert "again and again crashes again and again" in lines


def test_runs_without_heartbeats_are_taken_for_dead_if_the_server_has_answered_for_as_long(swept):
    """One that waits for its end is not: a cancelled run must not be resumed."""
    late = SILENCE_S + 10
    runs = (
        run("silent", "RUNNING", 1000, heard=[late]),
        run("of a new attempt, silent", "RUNNING", late, heard=[1000]),
        run("has just begun", "RUNNING", 10, heard=[1000]),
        run("alive", "RUNNING", 1000, heard=[HEARTBEAT_S, late]),
        run("never heard of", "RUNNING", 1000),
        run("is being cancelled", "CANCELLING", 1000, heard=[late]),
        run("of somebody else", "RUNNING", 1000, heard=[late], tags={"nightly"}),
    )
    assert swept(runs)[0] == {"silent": "Crashed", "of a new attempt, silent": "Crashed"}
    assert swept(runs, judge_silence=False)[0] == {}
    assert SILENCE_S > 2 * HEARTBEAT_S  # one lost heartbeat is not silence


def test_runs_that_a_worker_took_and_that_do_not_begin_are_taken_for_dead(swept):
    found, _ = swept(
        [
            run("of a lost node", "PENDING", PENDING_S + 10),
            run("waits for NPUs", "PENDING", PENDING_S - 10),
            run("waits for a worker", "SCHEDULED", PENDING_S + 10),
            run("of somebody else", "PENDING", PENDING_S + 10, tags={"nightly"}),
        ]
    )
    assert found == {"of a lost node": "Crashed"}
    _, pods = read_template("kubernetes-ascend-train")
    assert pods["variables"]["properties"]["pod_watch_timeout_seconds"]["default"] < PENDING_S


def test_a_run_keeps_its_slot_until_it_begins_or_is_taken_for_dead():
    """Prefect cancels a run whose slot was given to another one before it began."""
    deployments = yaml.safe_load(FILE.read_text())["deployments"]
    limits = [one["concurrency_limit"] for one in deployments if "concurrency_limit" in one]
    assert len(limits) == 3
    assert {one["grace_period_seconds"] for one in limits} == {PENDING_S + SILENCE_S}


def test_a_deploy_sees_when_a_watchdog_has_last_looked(monkeypatch):
    kept = {}
    monkeypatch.setattr(Variable, "set", lambda name, value, overwrite: kept.update({name: value}))
    monkeypatch.setattr(Variable, "get", kept.get)
    monkeypatch.setattr(watchdog, "get_client", lambda sync_client: nullcontext(Server([])))
    assert watchdog.last_seen() is None
    sweep(Limits())
    assert 0 <= watchdog.last_seen() < 60
