"""The loop around a trainer of plain Python, and rollouts reduced to the order of their calls."""

import time

import pytest
import torch

from engine.config import Config
from engine.errors import BadInput, RatioGapError
from engine.run.trace import Trace, read_spans
from engine.trainer.loop import Loop, Trainer
from support.groups import numbered_group


class Plain(Trainer):
    """What the loop needs of a trainer, and no more."""

    def __init__(self, calls, failing=""):
        self.calls = calls
        self.failing = failing
        self.weight = torch.zeros(1)

    def tensors(self):
        yield "weight", self.weight

    def probe(self, token_ids):
        return [-1.0] * (len(token_ids) - 1)

    def accumulate(self, window):
        self.calls.append(("accumulate", *(group.index for group in window)))

    def update(self, responses):
        self.calls.append(("update", responses))
        if self.failing == "update":
            raise BadInput("update failed")
        self.weight += 1
        return {"loss": 0.5}


class Hooked(Plain):
    """A trainer with more to say."""

    gap = 0.0
    has_moved = False

    def start_step(self, step):
        self.calls.append(("start_step", step))

    def add_wait(self, seconds):
        self.calls.append("add_wait")

    def worst_gap(self):
        self.calls.append("worst_gap")
        return self.gap

    def figures(self):
        self.calls.append("figures")
        return {"wait_s": 0.01, "versions_seen": [7]}


class Rollouts:
    """Gives the windows that it was made with, in every step."""

    sent_bytes = 5

    def __init__(self, calls, windows=(), seconds=0.0):
        """`seconds`: how long the comparison of weights takes."""
        self.calls = calls
        self._windows = windows
        self._seconds = seconds

    def begin(self, start):
        self.calls.append(("begin", start))

    def publish(self, model, version):
        self.calls.append(("publish", version, float(dict(model.tensors())["weight"])))
        return 0.25

    def start(self, step):
        self.calls.append(("start", step))

    def verify(self, model, version):
        self.calls.append(("verify", version, model.probe([1, 2])))
        time.sleep(self._seconds)

    def windows(self, step, prepare):
        yield from self._windows

    def failed(self, error):
        self.calls.append(("failed", str(error)))


def run(trainer, rollouts, trace=None, rollout=None, start=0, **train):
    """The figures of each step, and at which steps a checkpoint was due; also where the loop raises."""
    told = []
    saved = []
    trainer.saved = saved
    Loop(
        config=Config(train={"steps": 1, "prompts_per_step": 2, **train}, rollout={"group_size": 2, **(rollout or {})}),
        trainer=trainer,
        rollouts=rollouts,
        trace=trace,
        report=lambda step, figures: told.append(figures),
        checkpoint=lambda step, figures: saved.append((step, figures is not None)),
    ).run(start)
    return told


def a_window(*indices):
    return list(map(numbered_group, indices))


def test_four_methods_make_a_trainer(tmp_path):
    calls = []
    trainer = Plain(calls)
    told = run(trainer, Rollouts(calls, [a_window(1), a_window(0)]), Trace(tmp_path, "trainer"))
    assert calls == [
        ("begin", 0),
        ("publish", 0, 0.0),
        ("start", 0),
        ("verify", 0, [-1.0]),
        ("accumulate", 1),
        ("accumulate", 0),
        ("update", 4),
    ]
    assert trainer.saved == [(1, True)]
    assert {key: told[0][key] for key in ("loss", "groups", "versions_seen", "reward_mean", "sync_s")} == {
        "loss": 0.5,
        "groups": [1, 0],
        "versions_seen": [0],
        "reward_mean": 1.0,
        "sync_s": 0.25,
    }
    spans = read_spans(tmp_path)
    assert [one["bytes"] for one in spans if one["name"] == "sync"] == [5]
    assert {one["name"] for one in spans} == {"sync", "check", "wait"}


def test_a_trainer_that_has_more_to_say_is_called_in_the_order_of_algorithm_1():
    calls = []
    told = run(Hooked(calls), Rollouts(calls, [a_window(0, 1)]), updates=2)
    assert calls == [
        ("begin", 0),
        ("start_step", 0),
        ("publish", 0, 0.0),
        ("start", 0),
        ("verify", 0, [-1.0]),
        "add_wait",
        ("accumulate", 0, 1),
        "worst_gap",
        "add_wait",
        ("update", 2),
        "figures",
    ]
    assert told[0]["versions_seen"] == [7]  # the trainer's own figures count
    assert told[0]["wait_ratio"] == 0.01 / told[0]["step_s"]


def test_a_gap_to_the_instances_ends_the_step_before_its_update():
    calls = []
    trainer = Hooked(calls)
    trainer.gap = float("nan")
    with pytest.raises(RatioGapError, match="step 1.*max.ratio - 1. = nan"):
        run(trainer, Rollouts(calls, [a_window(0)]), start=1, steps=2)
    assert trainer.saved == [(1, False)]
    assert ("update", 4) not in calls


@pytest.mark.parametrize(("step", "moved"), [(1, False), (1, True), (0, False)])
def test_an_error_leaves_a_checkpoint_of_the_weights_before_the_step_unless_they_changed_or_are_the_base_models(
    step, moved
):
    calls = []
    trainer = Hooked(calls, failing="update")
    trainer.has_moved = moved
    with pytest.raises(BadInput, match="update failed"):
        run(trainer, Rollouts(calls), start=step, steps=2)
    assert trainer.saved == ([] if moved or not step else [(1, False)])
    assert calls[-1] == ("failed", "update failed")


def test_the_time_blocked_in_the_comparison_of_weights_is_a_part_of_the_step_of_its_own():
    (figures,) = run(Plain([]), Rollouts([], seconds=0.05))
    assert 0.05 <= figures["check_s"] <= figures["step_s"]
    assert figures["wait_s"] < 0.05


def test_a_step_takes_as_long_as_it_takes_also_when_the_machines_clock_is_set_back(monkeypatch):
    now = iter(range(10**9, 0, -3600))
    monkeypatch.setattr("time.time", lambda: float(next(now)))
    told = run(Plain([]), Rollouts([]), steps=2)
    assert len(told) == 2
    for figures in told:
        assert 0 <= figures["step_s"] < 60
        assert 0 <= figures["rollout_to_train_end_s"] < 60
        assert figures["wait_ratio"] > 0


def test_a_batch_that_an_earlier_step_started_took_longer_than_its_own_step():
    rollouts = Rollouts([], seconds=0.02)
    told = run(Plain([]), rollouts, rollout={"partial": True}, steps=3, mode="one_step_off")
    whole = [figures["rollout_to_train_end_s"] for figures in told]
    assert whole[0] < told[0]["step_s"]  # without the publish before it
    assert all(time > figures["step_s"] + 0.02 for time, figures in zip(whole[1:], told[1:], strict=True))
