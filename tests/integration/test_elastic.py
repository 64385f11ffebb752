"""Instances of a running job that die, hang, err, come and go.

Whatever happens to them, every response of every step is trained exactly once, on the step's weights, and the final
weights are those of a run that nothing happened to, bit for bit:
`rollout.deterministic` and `train.consume = "prompt_order"`.
"""

import contextlib
import re
import signal
import time

import pytest

from support import elastic_job
from support.elastic_job import Job
from support.faults import answer_500, drop_connections, kill, kill_in_update, sleep_until, stopped
from support.runs import base_settings
from support.whole_runs import run as train
from support.whole_runs import same, steps, weights

# every wait has a deadline of its own; the first test runs two jobs
pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

STEPS = 10
SAME = ("step", "weight_version", "versions_seen", "reward_mean", "response_length_mean")
SAME += ("trained_tokens", "loss", "grad_norm")
"""Keys of steps.jsonl that no fault may change."""


def recipe(settings, folder):
    """A run in `folder`."""
    return elastic_job.exact_recipe(settings, folder, STEPS, instances=2) | {"rollout.heartbeat_s": 1.5}


@pytest.fixture
def two(settings, tmp_path):
    """A run with two instances."""
    return recipe(settings, tmp_path)


@pytest.fixture
def one(two):
    """A run with one instance."""
    return two | {"rollout.instances": 1, "rollout.devices": two["rollout.devices"][:1]}


@pytest.fixture(scope="module")
def undisturbed(tiny_model, problems, tmp_path_factory):
    """The output folder of the run that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(recipe(base_settings(tiny_model, problems, folder), folder), folder)
    return folder


@pytest.fixture
def job(tmp_path):
    """Starts a job; ends it after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda settings: stack.enter_context(Job(settings, tmp_path))


def end(run, undisturbed):
    """Wait for the end and compare with the run that nothing happened to."""
    lines = run.end()
    for got, expected in zip(lines, steps(undisturbed, "run"), strict=True):
        assert {key: got[key] for key in SAME} == {key: expected[key] for key in SAME}
    assert same(weights(run.folder.parent, "run"), weights(undisturbed, "run"))
    return lines


def test_killed_in_the_middle_of_a_step(two, job, undisturbed):
    run = job(two)
    run.wait(lambda: run.steps() >= 2 and run.works("instance-0"), "work of instance-0")
    kill(run, "instance-0")
    with run.held():
        run.wait(lambda: run.is_("instance-0", state="serving", restarts=1), "its return")
        step = run.steps()
    lines = end(run, undisturbed)
    assert lines[-1]["pool_size"] == 2
    assert any(span["step"] > step for span in run.spans("rollout") if span["lane"] == "instance-0")


@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["file", "gloo"])
def test_killed_during_a_weight_update(two, job, undisturbed, transport):
    # not taken for silent before it is killed
    run = job(two | {"weights.transport": transport, "rollout.heartbeat_s": 15})
    run.wait(lambda: run.steps() >= 2, "two steps")
    kill_in_update(run, "instance-1")
    with run.held():
        run.wait(lambda: run.is_("instance-1", state="serving", restarts=1), "its return")
    end(run, undisturbed)
    states = run.last_states("instance-1")
    assert (len(states), states[0]) == (2, "updating")


@pytest.mark.nightly
def test_stopped_for_20_s(one, job, undisturbed):
    """The only one: the run waits for it, and it comes back through a weight update of its own."""
    run = job(one)
    run.wait(lambda: run.steps() >= 2, "two steps")
    with stopped(run, "instance-0") as began:
        steps = run.steps()
        assert time.monotonic() - began < 8
        sleep_until(began + 20)
        assert run.steps() <= steps + 1
    end(run, undisturbed)
    assert run.periods("instance-0").count("out") == 1
    assert run.periods("instance-0").count("starting") == 1  # it is the same process


def test_dropped_connections_and_500s(one, job, undisturbed):
    run = job(one)
    _, url = run.another()
    run.wait(lambda: run.steps() >= 1, "a step")
    proxy = run.proxied(url)
    with run.held():
        run.wait(lambda: run.serve("proxied"), "it to serve")
    answer_500(run, proxy)
    drop_connections(run, proxy)
    end(run, undisturbed)
    assert proxy.faults["500"] >= 3
    assert proxy.faults["drop"] >= 1


def test_one_joins_and_one_leaves(two, job, undisturbed):
    run = job(two)
    _, url = run.another()
    run.wait(lambda: run.steps() >= 2, "two steps")
    run.join("late", url)
    with run.held():
        run.wait(lambda: run.serve("late"), "it to serve")
    run.wait(lambda: run.works("instance-1"), "work of instance-1")
    run.call("/leave", {"name": "instance-1"})
    with run.held():
        run.wait(lambda: "instance-1" not in run.instances(), "it to leave")
        figures = run.ask("/metrics").decode()
    assert "metronome_pool_size 2.0" in figures
    assert 'metronome_pool_instance_tokens_per_s{instance="late"}' in figures
    assert re.search(r"^metronome_step_loss -?[0-9.e-]+$", figures, re.MULTILINE)
    lines = end(run, undisturbed)
    assert lines[-1]["pool_size"] == 2
    assert any(span["lane"] == "late" for span in run.spans("rollout"))
    assert run.periods("instance-1")[-1] == "draining"


@pytest.mark.nightly
def test_all_are_killed_and_one_comes_and_leaves(two, job, undisturbed):
    """It comes and leaves as users have it: by `metronome serve --join` and SIGTERM."""
    run = job(two | {"rollout.restarts": 0})
    run.wait(lambda: run.steps() >= 2 and run.works("instance-0"), "work")
    for name in ("instance-0", "instance-1"):
        kill(run, name)
    run.wait(lambda: not run.instances(), "their end to be noticed")
    joined = run.guest()
    run.wait(lambda: run.serve("guest"), "the guest")
    lines = end(run, undisturbed)
    assert lines[-1]["pool_size"] == 1
    joined.send_signal(signal.SIGTERM)
    assert joined.wait(timeout=30) == 0


def test_a_run_without_instances_waits_for_the_first_and_says_how_it_joins(one, job, tmp_path):
    """It waits for longer than rollout.wait_s, from when the trainer is ready."""
    run = job(one | {"rollout.instances": 0, "rollout.devices": [], "rollout.wait_s": 1.5, "train.steps": 2})
    run.wait(lambda: "waits for the first instance" in run.output(), "it to say that it waits")
    assert f"metronome serve {run.folder}/config.toml --join {run.folder}" in run.output()
    run.wait(lambda: run.is_ready(), "the trainer")
    sleep_until(time.monotonic() + 4)
    run.guest()
    run.wait(lambda: run.serve("guest"), "the guest")
    assert len(run.end()) == 2
