"""The loop around a policy and rollouts reduced to the order of their calls."""

import time
from types import SimpleNamespace

import pytest
import torch  # noqa: F401  (the trainer's modules need it)

from engine.config import Config
from engine.errors import BadInput
from engine.run.trace import Trace
from engine.trainer.loop import Loop


class Calls:
    """Any method, noted by name; some return something, `failing` raises."""

    def __init__(self, failing=""):
        self.calls = []
        self.failing = failing
        self.models = SimpleNamespace(copy_policy_to_old=lambda: self.calls.append("copy"))
        self.metrics = SimpleNamespace(add_wait=lambda seconds: None)

    def __getattr__(self, name):
        def call(*arguments, **named):
            self.calls.append(name)
            if name == self.failing:
                raise BadInput(f"{name} failed")
            if name == "reduce":
                arguments[1](1.0, 2.0)  # a window that was held
            return {"publish": 0.0, "work": iter(()), "update": (1.0, 0.1), "figures": {}}.get(name)

        return call


def run(tmp_path, policy, rollouts):
    config = Config(train={"steps": 1})
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


def test_a_users_control_that_fails_leaves_a_checkpoint_of_the_weights_before_the_step(tmp_path):
    policy = Calls(failing="decide")
    rollouts = Calls()
    with pytest.raises(BadInput, match="decide failed"):
        run(tmp_path, policy, rollouts)
    assert policy.saved == [0]
    assert "copy" not in policy.calls
    assert "update" not in policy.calls
    assert rollouts.calls[-1] == "failed"
