"""An instance's states, and random sequences of events (support/pool_machine.py), none of which may lose a place or a
response."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.stateful import run_state_machine_as_test

from engine.config import Config
from engine.orchestrator.pool import instance
from engine.orchestrator.pool.instance import NEXT, WORKING, Instance
from engine.orchestrator.pool.pool import Pool, _Waiter
from engine.wire.rollout_messages import Load
from support.pool_machine import PoolMachine
from support.virtual_time import virtual

SEQUENCES = settings(
    max_examples=300,
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

    def __init__(self):
        self.cuts = []
        self.trusted = []

    def end_calls(self, reason):
        self.cuts.append(reason)

    def release_responses(self):
        self.trusted.append(True)


@pytest.mark.slow
def test_no_sequence_of_events_breaks_the_pool_and_together_they_pass_every_transition(monkeypatch):
    virtual(monkeypatch)
    # Hypothesis mixes in constants of the modules that other tests have imported; then the sequences would be others.
    monkeypatch.setattr(HypothesisProvider, "_maybe_draw_constant", lambda self, *given, **named: None)
    passed = set()
    go = Instance._go

    def noted(self, state):
        before = self._state
        go(self, state)
        passed.add((before, state))

    monkeypatch.setattr(Instance, "_go", noted)
    run_state_machine_as_test(PoolMachine, settings=SEQUENCES)
    assert passed == {(state, after) for state, following in NEXT.items() for after in following}


async def ask_without_giving_back(self, avoid, first, least, size):
    asked = _Waiter(asyncio.get_running_loop().create_future(), size, avoid, least)
    (self._waiting.appendleft if first else self._waiting.append)(asked)
    self._hand_out()
    return await asked.place


def admit_one_that_leaves(self, instance):
    if instance.lives:
        instance.admit()
        self.changed()


def exclude_without_cut(self, reason):
    self._go("out")
    self.reason = reason
    self.version = None


def trust_from_the_start(self):
    pass


MISTAKES = {
    "a place is lost when whoever waits for it is cancelled": (Pool, "_wait_for_place", ask_without_giving_back),
    "one that asked to leave is admitted": (Pool, "admit_instance", admit_one_that_leaves),
    "an excluded instance keeps its requests": (Instance, "exclude", exclude_without_cut),
    "new weights are trusted before they are compared": (Instance, "hold_responses", trust_from_the_start),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_sequences_find(monkeypatch, mistake):
    virtual(monkeypatch)
    monkeypatch.setattr(*MISTAKES[mistake])
    with pytest.raises(AssertionError):  # ends at the first sequence that finds it
        run_state_machine_as_test(PoolMachine, settings=settings(SEQUENCES, max_examples=2000))


PATHS = {
    "starting": (),
    "updating": ("begin_update",),
    "serving": ("admit",),
    "draining": ("admit", "drain"),
    "out": ("exclude",),
    "gone": ("depart",),
}
"""To a state, from the instance's beginning."""
REASONS = {"depart": ("left",), "exclude": ("out",)}
TO = {
    "starting": "wait_for_weights",
    "updating": "begin_update",
    "serving": "admit",
    "out": "exclude",
    "gone": "depart",
}


def brought(state):
    """An instance in a state."""
    one = Instance(Client())
    one.record_answer()
    one.checked = True
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


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(instance, "time", SimpleNamespace(monotonic=self, time=self))

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.mark.parametrize("state", NEXT)
def test_only_one_that_may_serve_holds_a_version_and_one_that_is_left_out_forgets_it(state):
    one = brought(state)
    one.record_version(3)
    assert one.version == (None if state in ("out", "gone") else 3)
    if "out" in NEXT[state]:
        one.exclude("out")
        assert one.version is None


@pytest.mark.parametrize(("act", "after"), [("exclude", "out"), ("depart", "gone")])
def test_the_calls_to_one_that_is_left_out_end_with_the_reason(act, after):
    one = brought("serving")
    getattr(one, act)("it hangs")
    assert (one.state, one.reason, one.client.cuts) == (after, "it hangs", ["it hangs"])


@pytest.mark.parametrize("state", NEXT)
def test_responses_of_one_that_was_left_out_are_not_released(state):
    one = brought(state)
    one.release_responses()
    assert one.client.trusted == ([True] if state in ("serving", "draining") else [])


async def test_who_waits_for_its_end_is_woken_by_it():
    one = brought("serving")
    waiting = asyncio.create_task(one.wait_until_gone(600.0))
    await asyncio.sleep(0)
    one.depart("left")
    await asyncio.wait_for(waiting, 5.0)
    await asyncio.wait_for(brought("serving").wait_until_gone(0.01), 5.0)


def test_it_is_met_once():
    one = Instance(Client())
    assert [one.record_answer(), one.record_answer()] == [True, False]


def test_its_pace_is_smoothed_and_groups_side_by_side_share_it():
    one = brought("serving")
    one.record_group(10.0, 5)
    assert one.group_s == 2.0
    one.record_group(3.0, 1)
    assert one.group_s == pytest.approx(0.7 * 2.0 + 0.3 * 3.0)


def test_tokens_per_second_are_those_between_two_answers_and_none_after_a_restart(clock):
    one = brought("serving")
    found = []
    for generated in (100, 300, 20, 60):
        clock.now += 2.0
        one.record_load(Load(running=0, waiting=0, generated_tokens=generated, weight_version=0))
        found.append(one.tokens_per_s)
    assert found == [0.0, 100.0, 0.0, 20.0]


def test_it_has_no_more_slots_than_its_limit_and_none_unless_it_serves():
    one = brought("serving")
    first, second = (one.take_place(4, 2) for _ in range(2))
    one.free_slot(second)
    with pytest.raises(RuntimeError, match="instance a: no slots for 2 responses: serving, 3 in flight"):
        one.take_place(4, 2)
    one.give_back(first)
    assert (one.groups, one.responses) == (1, 1)
    larger = one.take_place(4, 5)  # a single group may have more responses than there are slots
    with pytest.raises(RuntimeError, match="instance a: no slots for 5 responses: serving, 6 in flight"):
        one.take_place(4, 5)
    one.give_back(second)
    one.give_back(larger)
    one.exclude("out")
    with pytest.raises(RuntimeError, match="instance a: no slots for 2 responses: out, 0 in flight"):
        one.take_place(4, 2)


def test_that_an_instance_serves_again_is_said_once_and_not_with_each_version_from_then_on(tmp_path):
    told = []
    notices = SimpleNamespace(happened=lambda stage, kind, text: told.append(text))
    pool = Pool(Config(), tmp_path, tmp_path, synced=True, notices=notices)
    one = Instance(Client())
    pool.instances.append(one)
    for update in (one.begin_update, one.begin_update, None, one.begin_update, one.begin_update):
        if update is None:
            pool.exclude_instance(one, "no answer")
            one.wait_for_weights()
        else:
            update()
            pool.admit_instance(one)
    assert told == ["a gets no prompts for now: no answer", "a is serving again"]
