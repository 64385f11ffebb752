"""Random sequences of events (support/pool_machine.py), none of which may lose a place or a response; and what an
instance knows of itself."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.stateful import run_state_machine_as_test

from engine.config import Config
from engine.orchestrator.pool import instance
from engine.orchestrator.pool.instance import NEXT, Instance, soonest_instance
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
        self.done = []

    def end_calls(self, reason):
        self.done.append(reason)

    def release_responses(self):
        self.done.append("released")


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


def only_count_a_failure(self):
    self.failures += 1


def only_count_an_exclusion(self, silent=False):
    self._times_out += 1


MISTAKES = {
    "a place is lost when whoever waits for it is cancelled": (Pool, "_wait_for_place", ask_without_giving_back),
    "one that asked to leave is admitted": (Pool, "admit_instance", admit_one_that_leaves),
    "an excluded instance keeps its requests": (Instance, "exclude", exclude_without_cut),
    "new weights are trusted before they are compared": (Instance, "hold_responses", trust_from_the_start),
    "failures leave nobody out": (Instance, "record_failure", only_count_a_failure),
    "nobody is given up": (Instance, "record_left_out", only_count_an_exclusion),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_sequences_find(monkeypatch, mistake):
    virtual(monkeypatch)
    monkeypatch.setattr(*MISTAKES[mistake])
    with pytest.raises(AssertionError):  # ends at the first sequence that finds it
        run_state_machine_as_test(PoolMachine, settings=settings(SEQUENCES, max_examples=2000))


def serving():
    one = Instance(Client())
    one.admit()
    return one


def test_a_transition_that_the_table_lacks_is_refused_by_name():
    one = serving()
    one.depart("left")
    with pytest.raises(RuntimeError, match="instance a: no transition from gone to serving"):
        one.admit()
    assert one.state == "gone"


def test_one_that_is_left_out_forgets_its_version_ends_its_calls_and_releases_nothing():
    one = serving()
    one.record_version(3)
    one.release_responses()
    one.exclude("it hangs")
    for _ in range(2):  # what was under way when it was left out, or comes after its end
        assert one.version is None
        one.record_version(4)
        one.release_responses()
        if one.state == "out":
            one.wait_for_weights()
            one.depart("left")
    assert one.client.done == ["released", "it hangs", "it waits for weights", "left"]


async def test_its_end_wakes_those_who_wait_for_it():
    one = serving()
    waiting = asyncio.create_task(one.wait_until_gone(600.0))
    await asyncio.sleep(0)
    one.depart("left")
    await asyncio.wait_for(waiting, 5.0)
    await asyncio.wait_for(serving().wait_until_gone(0.01), 5.0)


def test_its_pace_is_smoothed_and_groups_side_by_side_share_it():
    one = serving()
    one.record_group(10.0, 5)
    assert one.group_s == 2.0
    one.record_group(3.0, 1)
    assert one.group_s == pytest.approx(0.7 * 2.0 + 0.3 * 3.0)


def test_tokens_per_second_are_those_between_two_answers_and_none_after_a_restart(monkeypatch):
    clock = itertools.count(1000, 2)
    monkeypatch.setattr(instance, "time", SimpleNamespace(monotonic=lambda: next(clock), time=lambda: 0.0))
    one = serving()
    found = []
    for generated in (100, 300, 20, 60):
        one.record_load(Load(running=0, waiting=0, generated_tokens=generated, weight_version=0))
        found.append(one.tokens_per_s)
    assert found == [0.0, 100.0, 0.0, 20.0]


def test_it_has_no_more_slots_than_its_limit_and_none_unless_it_serves():
    one = serving()
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


@pytest.mark.parametrize(
    ("slow", "fast", "avoid", "expected"),
    [  # (responses in flight, seconds of a group)
        ((0, 3.0), (4, 1.0), (), "fast"),
        ((0, 3.0), (8, 1.0), (), "slow"),  # 1.0 · 12 = 3.0 · 4: the first of them
        ((0, None), (4, 1.0), (), "slow"),  # one that finished no group yet counts as the fastest
        ((0, 3.0), (13, 1.0), (), "slow"),  # the other has no slot for each response
        ((13, 3.0), (13, 1.0), (), None),
        ((0, 3.0), (4, 1.0), ("fast",), "slow"),
        ((13, 3.0), (0, 1.0), ("fast",), None),  # it is waited for, not sent to the one that failed
        ((0, 3.0), (4, 1.0), ("slow", "fast"), "fast"),
    ],
)
def test_a_group_goes_where_it_is_probably_finished_first(slow, fast, avoid, expected):
    made = {name: SimpleNamespace(responses=one[0], group_s=one[1]) for name, one in (("slow", slow), ("fast", fast))}
    found = soonest_instance(list(made.values()), 16, 4, [made[name] for name in avoid])
    assert found is made.get(expected)


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
