"""On real vLLM: instances of one running job that hang, err, die, come and go, one after the other.

One job for all of it: what takes long is to start an instance. On the embedded engine each fault has a job of its own,
whose weights are compared bit for bit with those of an undisturbed one (tests/integration/test_elastic.py). Here they
are not: on a CPU vLLM's batches may change the last bit.
"""

import signal

import pytest

from engine.run.files import read_lines
from support.elastic_job import Job, check_on_policy, recipe
from support.faults import answer_500, drop_connections, kill_in_update, sleep_until, stopped
from support.runs import Tree

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
STEPS = 16
WORKING = ("starting", "updating", "serving")
PATIENCE_S = 600.0
"""An instance starts in half a minute, on a busy machine in many."""


@pytest.fixture
def run(settings, tmp_path):
    """It starts one instance itself, and again when that died; weights go over the network."""
    chosen = recipe(settings, tmp_path, STEPS) | {
        "rollout.engine": "vllm",
        "rollout.instances": 1,
        "rollout.timeout_s": PATIENCE_S,
        "rollout.wait_s": PATIENCE_S,
        "weights.transport": "gloo",
        "rollout.heartbeat_s": 15,  # a step ends sooner: kill_in_update
    }
    with Job(chosen, tmp_path, PATIENCE_S) as job:
        yield job


def test_a_job_goes_on_through_one_fault_after_the_other(run):
    with run.held():
        another, url = run.another()
        proxy = run.proxied(url)
        run.wait(lambda: run.serve("instance-0", "proxied"), "both to serve")
    began = goes_on(run)
    with stopped(run, "instance-0") as since:
        without_it = goes_on(run)
        guest = run.guest()  # it starts while other things happen
        with run.held():
            sleep_until(since + 20)
    with run.held():
        run.wait(lambda: run.serve("instance-0"), "its return")
    goes_on(run)
    answer_500(run, proxy)
    goes_on(run)
    drop_connections(run, proxy)
    goes_on(run)
    with run.held():
        run.wait(lambda: run.serve("instance-0", "proxied", "guest"), "three to serve")
    goes_on(run)
    killed = kill_in_update(run, "instance-0")
    goes_on(run)
    leave(run, guest)
    goes_on(run)
    again = Tree(run.process.pid).named("--name instance-0")
    again.suspend()  # so that there is a moment without any
    another.kill()
    run.wait(lambda: not any(one["state"] in WORKING for one in run.instances().values()), "all to be gone")
    again.resume()
    alone = run.steps()
    with run.held():
        run.wait(lambda: run.is_("instance-0", state="serving", restarts=1), "it to come back")
    lines = run.end()

    assert alone < STEPS
    sizes = [line["pool_size"] for line in lines]
    assert (sizes[began - 1], sizes[without_it - 1], max(sizes), sizes[-1]) == (2, 1, 3, 1)
    assert {span["lane"] for span in run.spans("rollout") if span["step"] > alone} == {"instance-0"}
    assert "updating" in run.last_states("instance-0")[:-1]  # killed there; stopped for 20 s it was not: one restart
    assert run.periods("guest")[-1] == "draining"
    assert proxy.faults["500"] >= 3
    assert proxy.faults["drop"] >= 1
    assert not any(process.is_running() for process in killed)


def goes_on(run):
    """Wait for a step to end that nothing happens in; how many did."""
    steps = run.steps()
    run.wait(lambda: run.steps() > steps, "the end of a step")
    check_on_policy(list(read_lines(run.folder / "steps.jsonl"))[: steps + 1], steps + 1)
    return steps + 1


def leave(run, guest):
    """By SIGTERM, at work."""
    run.wait(lambda: run.works("guest"), "work of the guest")
    guest.send_signal(signal.SIGTERM)
    run.wait(lambda: "guest" not in run.instances(), "it to leave")
    assert guest.wait(timeout=60) == 0
