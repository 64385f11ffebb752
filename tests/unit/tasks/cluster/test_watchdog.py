"""Which runs the watchdog takes for dead, resumes and ends; tests/stack/test_silent_runs.py has a real server."""

from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
import yaml
from prefect.variables import Variable

from tasks.cluster import watchdog
from tasks.cluster.deploy import FILE
from tasks.cluster.watchdog import FORGOTTEN_S, HEARTBEAT_S, PENDING_S, POD_S, SILENCE_S, STARTS, TAG, Limits, sweep


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
    fields = {
        "infrastructure_pid": None,
        "id": name,
        "name": name,
        "tags": {TAG, "nightly"},
        "deployment_id": "ours",
        "end_time": before(for_s),
    }
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


LATE_S = SILENCE_S + 10
OTHERS = {"tags": {"nightly"}}
NO_WORKER = {"deployment_id": None}
RUNS = (
    # name, state, seconds in it, what else, the state that it is given
    ("crashed", "CRASHED", 60, {}, "AwaitingRetry"),
    ("may be reported a second time", "CRASHED", 15, {}, ""),
    ("given up", "CRASHED", FORGOTTEN_S + 60, {}, ""),
    ("of somebody else", "CRASHED", 60, OTHERS, ""),
    ("failed", "FAILED", 60, {}, ""),
    ("cancelled", "CANCELLED", 60, {}, ""),
    ("without a deployment, which no worker takes", "CRASHED", 60, NO_WORKER, ""),
    ("again and again", "CRASHED", 60, {"starts": range(60, 60 + STARTS)}, "Failed"),
    ("once less", "CRASHED", 60, {"starts": range(60, 60 + STARTS - 1)}, "AwaitingRetry"),
    ("over hours", "CRASHED", 60, {"starts": range(0, 600 * STARTS, 600)}, "AwaitingRetry"),
    ("silent", "RUNNING", 1000, {"heard": [LATE_S]}, "Crashed"),
    ("of a new attempt, silent", "RUNNING", LATE_S, {"heard": [1000]}, "Crashed"),
    ("has just begun", "RUNNING", 10, {"heard": [1000]}, ""),
    ("alive", "RUNNING", 1000, {"heard": [HEARTBEAT_S, LATE_S]}, ""),
    ("never heard of", "RUNNING", 1000, {}, ""),
    ("is being cancelled", "CANCELLING", 1000, {"heard": [LATE_S]}, ""),
    ("silent, of somebody else", "RUNNING", 1000, {"heard": [LATE_S]} | OTHERS, ""),
    ("of a lost node", "PENDING", PENDING_S + 10, {}, "Crashed"),
    ("about to begin", "PENDING", PENDING_S - 10, {}, ""),
    ("of a lost process", "PENDING", PENDING_S + 10, {"infrastructure_pid": "node-1:4711"}, "Crashed"),
    ("of a pod that waits for NPUs", "PENDING", PENDING_S + 10, {"infrastructure_pid": "metronome:job-7x"}, ""),
    ("of a pod that never begins", "PENDING", POD_S + 10, {"infrastructure_pid": "metronome:job-8x"}, "Crashed"),
    ("waits for a worker", "SCHEDULED", PENDING_S + 10, {}, ""),
    ("late, of somebody else", "PENDING", PENDING_S + 10, OTHERS, ""),
)


def test_what_a_look_does_with_runs(swept):
    """One that waits for its end is not taken for dead: a cancelled run must not be resumed. Silence counts only if the
    server has answered for as long."""
    runs = [run(name, state, for_s, **more) for name, state, for_s, more, _ in RUNS]
    wanted = {name: state for name, *_, state in RUNS if state}
    found, lines = swept(runs)
    assert found == wanted
    assert {"resumed crashed", "again and again crashes again and again", "silent sends no more heartbeats"} < {*lines}
    silent = {"silent", "of a new attempt, silent"}
    assert swept(runs, judge_silence=False)[0] == {name: state for name, state in wanted.items() if name not in silent}
    assert SILENCE_S > 2 * HEARTBEAT_S  # one lost heartbeat is not silence


def test_a_run_keeps_its_slot_until_it_begins_or_is_taken_for_dead():
    """Prefect cancels a run whose slot was given to another one before it began."""
    deployments = yaml.safe_load(FILE.read_text())["deployments"]
    limits = [one["concurrency_limit"] for one in deployments if "concurrency_limit" in one]
    assert len(limits) == 2
    assert {one["grace_period_seconds"] for one in limits} == {POD_S}
