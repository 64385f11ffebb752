"""Three faults that cost other projects months, on real runs: `make demonstrate` shows what Metronome says of each.

A proxy between trainer and instance answers for the instance and drops every update; a trainer is killed in the middle
of a step; an instance labels its responses with another weight version than that which sampled them.
"""

import json
import re

import pytest

from support import elastic_job
from support.broken_engine import BrokenEngine, ignores_updates, reply_with, stale_version
from support.elastic_job import OTHERS_TOKEN, Job
from support.runs import Tree, send, wait_for
from support.whole_runs import orchestrating, run, same, steps, weights

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]
STEPS = 5
PATIENCE_S = 300


@pytest.fixture
def exact(settings, tmp_path):
    """A run whose weights depend on nothing but its seed."""
    patient = {"checkpoint.every": 1, "rollout.timeout_s": PATIENCE_S, "train.timeout_s": PATIENCE_S}
    return elastic_job.exact_recipe(settings, tmp_path, STEPS) | patient


def show(title, *lines):
    print(f"\n{title}")
    for line in lines:
        print(f"  {line}")


def joined(job, fault):
    """Another instance behind a proxy with a fault joins the run, between two steps."""
    _, url = job.another()
    proxy = job._stack.enter_context(BrokenEngine(url, OTHERS_TOKEN, fault).serving())
    job.wait(lambda: job.steps() >= 1, "a step")
    job.join("behind-a-proxy", proxy)


def test_a_proxy_that_drops_an_update(exact, tmp_path):
    """The proxy says that each update has arrived and that the instance has its version."""
    with Job(exact, tmp_path, PATIENCE_S) as job:
        joined(job, ignores_updates)
        job.wait(lambda: "behind-a-proxy" in job.output(), "what the run says of it")
        lines = job.end()
        said = [line for line in job.output().splitlines() if "behind-a-proxy" in line]
    show("The instance behind the proxy got no prompt, and the run went on with the other one:", *said)
    assert any("log-probabilities" in line for line in said)
    assert len(lines) == STEPS
    assert not [span for span in job.spans("rollout") if span["lane"] == "behind-a-proxy"]


def killed(settings, folder):
    """Kill the trainer of a run in the middle of a step: (the step, what the run says)."""
    with orchestrating(settings, folder) as (orchestrator, said):
        wait_for(lambda: len(steps(folder, "killed")) >= 2, "two steps", PATIENCE_S)
        (folder / "gate").touch()  # no reward is given, so no step ends now
        tree = Tree(orchestrator.pid)
        send(tree.named("engine.trainer.rank --"), "SIGKILL")
        assert orchestrator.wait(PATIENCE_S) == 1
        assert tree.left() == []
        (folder / "gate").unlink()
        return len(steps(folder, "killed")), [line for line in said().splitlines() if "SIGKILL" in line]


def test_a_kill_in_mid_step(exact, tmp_path):
    run(exact | {"run.name": "undisturbed"}, tmp_path, timeout_s=PATIENCE_S)
    step, said = killed(exact | {"run.name": "killed"}, tmp_path)
    assert said
    assert step < STEPS
    run(exact | {"run.name": "killed"}, tmp_path, "--resume", timeout_s=PATIENCE_S)
    assert same(weights(tmp_path, "killed"), weights(tmp_path, "undisturbed"))
    show(
        f"The trainer was killed (-9) in step {step}, and the run resumed:",
        *said,
        f"the weights after {STEPS} steps are those of an undisturbed run, bit for bit",
    )


def test_a_wrong_version_label(exact, tmp_path):
    with Job(exact, tmp_path, PATIENCE_S) as job:
        joined(job, reply_with(stale_version))
        job.wait(lambda: job.process.poll() is not None or job.steps() == STEPS, "the end")
        assert job.process.wait(PATIENCE_S) == 1, job.output()
        failure = json.loads((job.folder / "failure.json").read_text())
        said = [line for line in job.output().splitlines() if line.startswith("error")]
    show("The step that got such a response stopped the run, untrained:", *said)
    assert failure["error"] == "StaleRolloutError"
    assert re.search(r"version", failure["message"])
