"""An instance's states, and random sequences of events (support/pool_machine.py), none of which may lose a place or a
response."""

import asyncio

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from engine.launcher.pool.dispatch import Dispatcher, _Waiter
from engine.launcher.pool.instance import NEXT, WORKING, Instance
from engine.launcher.pool.pool import Pool
from engine.launcher.weight_sync import sync
from support.pool_machine import PoolMachine
from support.virtual_time import virtual

SEQUENCES = settings(
    max_examples=200,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Client:
    name = "a"
    url = "http://127.0.0.1:1"

    def cut(self, reason):
        pass


def test_no_sequence_of_events_breaks_the_pool_and_together_they_pass_every_transition(monkeypatch):
    virtual(monkeypatch)
    monkeypatch.setattr(sync, "wire_of", lambda file: dict.fromkeys(("names", "dtypes", "shapes", "checksums"), []))
    passed = set()
    go = Instance._go

    def noted(self, state):
        before = self._state
        go(self, state)
        passed.add((before, state))

    monkeypatch.setattr(Instance, "_go", noted)
    run_state_machine_as_test(PoolMachine, settings=SEQUENCES)
    assert passed == {(state, after) for state, following in NEXT.items() for after in following}


async def ask_without_giving_back(self, avoid, first, least):
    asked = _Waiter(asyncio.get_running_loop().create_future(), avoid, least)
    (self._waiting.appendleft if first else self._waiting.append)(asked)
    self.hand_out()
    return await asked.place


def admit_one_that_leaves(self, instance):
    if instance.lives:
        instance.admit()
        self.changed()


def exclude_without_cut(self, reason):
    self._go("silent")
    self.reason = reason
    self.version = None


def trust_from_the_start(self):
    pass


MISTAKES = {
    "a place is lost when the one who waits for it is cancelled": (Dispatcher, "ask", ask_without_giving_back),
    "one that asked to leave is admitted": (Pool, "admit", admit_one_that_leaves),
    "an excluded instance keeps its requests": (Instance, "exclude", exclude_without_cut),
    "new weights are trusted before they are compared": (Instance, "distrust", trust_from_the_start),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_sequences_find(monkeypatch, mistake):
    virtual(monkeypatch)
    monkeypatch.setattr(sync, "wire_of", lambda file: dict.fromkeys(("names", "dtypes", "shapes", "checksums"), []))
    monkeypatch.setattr(*MISTAKES[mistake])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(PoolMachine, settings=SEQUENCES)


PATHS = {
    "starting": (),
    "updating": ("begin_update",),
    "catching_up": ("begin_catch_up",),
    "serving": ("admit",),
    "draining": ("admit", "drain"),
    "silent": ("exclude",),
    "gone": ("depart",),
}
"""To a state, from the instance's beginning."""
REASONS = {"depart": ("left",), "exclude": ("silent",)}
TO = {
    "starting": "wait_for_publish",
    "updating": "begin_update",
    "catching_up": "begin_catch_up",
    "serving": "admit",
    "silent": "exclude",
    "gone": "depart",
}


def brought(state):
    """An instance in a state."""
    one = Instance(Client())
    one.heard()
    for step in PATHS[state]:
        getattr(one, step)(*REASONS.get(step, ()))
    return one


def test_the_table_in_the_docstring_is_what_the_code_does():
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in Instance.__doc__.splitlines()
        if line.strip().startswith("|")
    ]
    said = {True: "yes", False: "no"}
    assert {state: (*columns, after) for state, _, *columns, after in rows[2:]} == {
        state: (said[one.takes_prompts], said[one.state in WORKING], said[one.gets_version], ", ".join(NEXT[state]))
        for state in NEXT
        for one in [brought(state)]
    }


@pytest.mark.parametrize("state", NEXT)
@pytest.mark.parametrize("after", TO)
def test_a_transition_that_the_table_lacks_is_refused_by_name(state, after):
    one = brought(state)
    act = getattr(one, TO[after])
    if after in NEXT[state]:
        act(*REASONS.get(TO[after], ()))
        return
    with pytest.raises(RuntimeError, match=f"instance a: no transition from {state} to {after}"):
        act(*REASONS.get(TO[after], ()))
    assert one.state == brought(state).state
