"""The loop around a policy and rollouts reduced to the order of their calls."""

import time
from types import SimpleNamespace

import pytest
import torch  # noqa: F401  (the trainer's modules need it)

from engine.config import Config
from engine.errors import BadInput
from engine.run.trace import Trace, read_spans
from engine.trainer.loop import Loop


class Calls:
    """Any method, noted by name; some return something, `failing` raises."""

    def __init__(self, failing="", at=1):
        """`failing`: the method that raises, the `at`th time it is called."""
        self.calls = []
        self.failing = failing
        self.at = at
        self.models = SimpleNamespace(copy_policy_to_old=lambda: self.calls.append("copy"))
        self.metrics = SimpleNamespace(add_wait=lambda seconds: None, computed_tokens=0, micro_batches=0)
        self.sent_bytes = 5

    def __getattr__(self, name):
        def call(*arguments, **named):
            self.calls.append(name)
            if name == self.failing and self.calls.count(name) == self.at:
                raise BadInput(f"{name} failed")
            if name == "reduce":
                self.metrics.computed_tokens += 30
                self.metrics.micro_batches += 2
                arguments[1](1.0, 2.0)  # a window that was held
            return {"publish": 0.0, "work": iter(()), "update": (1.0, 0.1), "figures": {"wait_s": 0.01}}.get(name)

        return call


def run(tmp_path, policy, rollouts, updates=1):
    config = Config(train={"steps": 1, "updates": updates})
    saved = []
    loop = Loop(
        config=config,
        policy=policy,
        rollouts=rollouts,
        trace=Trace(tmp_path, "trainer"),
        report=lambda step, figures: None,
        checkpoint=lambda step, figures: saved.append(step),
    )
    try:
        loop.run(0)
    finally:
        policy.saved = saved
    return saved


def test_gradient_control_decides_before_anything_moves_and_held_windows_are_signs_of_life(tmp_path):
    policy = Calls()
    rollouts = Calls()
    assert run(tmp_path, policy, rollouts) == [1]
    assert policy.calls == ["start_step", "reduce", "decide", "copy", "update", "figures"]
    assert rollouts.calls == ["publish", "start", "verify", "work", "settle", "heartbeat"]


def test_the_time_blocked_in_the_comparison_of_weights_is_a_part_of_the_step_of_its_own(tmp_path):
    policy = Calls()
    rollouts = Calls()
    told = []
    rollouts.verify = lambda models, version: time.sleep(0.05)
    Loop(
        config=Config(train={"steps": 1}),
        policy=policy,
        rollouts=rollouts,
        trace=Trace(tmp_path, "trainer"),
        report=lambda step, figures: told.append(figures),
        checkpoint=lambda step, figures: None,
    ).run(0)
    (figures,) = told
    assert 0.05 <= figures["check_s"] <= figures["step_s"] - figures["update_s"]
    assert figures["wait_ratio"] == 0.01 / figures["step_s"]


def test_a_step_takes_as_long_as_it_takes_also_when_the_machines_clock_is_set_back(tmp_path, monkeypatch):
    told = []
    now = iter(range(10**9, 0, -3600))
    monkeypatch.setattr("time.time", lambda: float(next(now)))
    Loop(
        config=Config(train={"steps": 2}),
        policy=Calls(),
        rollouts=Calls(),
        trace=Trace(tmp_path, "trainer"),
        report=lambda step, figures: told.append(figures),
        checkpoint=lambda step, figures: None,
    ).run(0)
    assert len(told) == 2
    for figures in told:
        assert 0 <= figures["step_s"] < 60
        assert 0 <= figures["rollout_to_train_end_s"] < 60
        assert figures["wait_ratio"] > 0


def test_a_batch_that_an_earlier_step_started_took_longer_than_its_own_step(tmp_path):
    told = []
    rollouts = Calls()
    rollouts.verify = lambda models, version: time.sleep(0.02)
    Loop(
        config=Config(train={"steps": 3, "mode": "one_step_off"}, rollout={"partial": True}),
        policy=Calls(),
        rollouts=rollouts,
        trace=Trace(tmp_path, "trainer"),
        report=lambda step, figures: told.append(figures),
        checkpoint=lambda step, figures: None,
    ).run(0)
    whole = [figures["rollout_to_train_end_s"] for figures in told]
    assert whole[0] < told[0]["step_s"]  # without the publish before it
    assert all(time > figures["step_s"] + 0.02 for time, figures in zip(whole[1:], told[1:], strict=True))


def test_a_users_control_that_fails_leaves_a_checkpoint_of_the_weights_before_the_step(tmp_path):
    policy = Calls(failing="decide")
    rollouts = Calls()
    with pytest.raises(BadInput, match="decide failed"):
        run(tmp_path, policy, rollouts)
    assert policy.saved == [0]
    assert "copy" not in policy.calls
    assert "update" not in policy.calls
    assert rollouts.calls[-1] == "failed"


def test_each_update_of_a_step_is_reduced_decided_and_made_in_turn(tmp_path):
    policy = Calls()
    rollouts = Calls()
    assert run(tmp_path, policy, rollouts, updates=2) == [1]
    assert policy.calls == ["start_step", *["reduce", "decide", "copy", "update"] * 2, "figures"]
    assert rollouts.calls == ["publish", "start", "verify", "work", "settle", "heartbeat", "heartbeat"]


def test_the_trace_says_what_each_window_computed_and_what_was_sent(tmp_path):
    run(tmp_path, Calls(), Calls(), updates=2)
    spans = read_spans(tmp_path)
    sizes = [(one["computed_tokens"], one["micro_batches"]) for one in spans if one["name"] == "train"]
    assert sizes == [(30, 2), (30, 2)]
    assert [one["bytes"] for one in spans if one["name"] == "sync"] == [5]


@pytest.mark.parametrize("failing", ["reduce", "decide"])
def test_an_error_after_the_first_update_leaves_no_checkpoint_of_half_a_step(tmp_path, failing):
    policy = Calls(failing, at=2)
    rollouts = Calls()
    with pytest.raises(BadInput, match=f"{failing} failed"):
        run(tmp_path, policy, rollouts, updates=2)
    assert policy.saved == []
    assert policy.calls.count("update") == 1
    assert rollouts.calls[-1] == "failed"
