"""An instance's states, and random sequences of events (support/pool_machine.py), none of which may lose a place or a
response."""

import asyncio

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from engine.launcher.pool.dispatch import Dispatcher, _Waiter
from engine.launcher.pool.instance import STATES, Instance
from engine.launcher.pool.pool import Pool
from support.pool_machine import PoolMachine, virtual

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
    passed = set()
    go = Instance._go

    def noted(self, state):
        before = self._state
        go(self, state)
        passed.add((before, state))

    monkeypatch.setattr(Instance, "_go", noted)
    run_state_machine_as_test(PoolMachine, settings=SEQUENCES)
    assert passed == {(state, after) for state, rules in STATES.items() for after in rules.next}


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
    monkeypatch.setattr(*MISTAKES[mistake])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(PoolMachine, settings=SEQUENCES)


def test_the_table_in_the_docstring_is_the_one_in_the_code():
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in Instance.__doc__.splitlines()
        if line.strip().startswith("|")
    ]
    told = {state: (*columns, after) for state, _, *columns, after in rows[2:]}
    said = {True: "yes", False: "no"}
    assert told == {
        state: (said[rules.takes_prompts], said[rules.counts], said[rules.gets_version], ", ".join(rules.next))
        for state, rules in STATES.items()
    }


@pytest.mark.parametrize(
    "path",
    [
        ("drain", "admit"),
        ("depart", "admit"),
        ("depart", "exclude"),
        ("exclude", "admit"),
        ("exclude", "begin_update"),
        ("begin_catch_up",),
        ("admit",),
    ],
)
def test_a_transition_that_the_table_lacks_is_refused_by_name(path):
    one = Instance(Client())
    one.admit()
    reasons = {"depart": ("left",), "exclude": ("silent",)}
    for step in path[:-1]:
        getattr(one, step)(*reasons.get(step, ()))
    with pytest.raises(RuntimeError, match=r"instance a: no transition from \w+ to \w+"):
        getattr(one, path[-1])(*reasons.get(path[-1], ()))
