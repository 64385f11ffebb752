"""The only instance dies in the middle of a step, in every mode and layout.

It starts again, gets the weights, and the step goes on. `Job.end` checks that each response is trained exactly once.
Where a step samples with its own weights, the final weights are those of a run that nothing happened to, bit for bit.
In the modes that sample ahead, the policy may have moved on when it is back: what was lost is sampled by newer weights,
of a version that the mode accepts, as after a resume.
"""

import contextlib
import threading
from functools import cache

import httpx
import pytest

from docs.examples.hf_trainer import HuggingFaceTrainer
from engine.client.service import ServiceClient
from engine.trainer.loop import Loop
from engine.trainer.rollouts import LiveRollouts
from engine.wire.access_token import authorization_headers, folder_token
from support import elastic_job
from support.elastic_job import PROMPTS, Job
from support.faults import kill
from support.runs import Tree, base_settings, config_of, wait_for
from support.whole_runs import run, same, weights

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
STEPS = 5
STALE = {"algorithm.old_policy": "rollout", "algorithm.kl_coef": 0}
OFF = STALE | {"train.mode": "one_step_off"}
BOUNDED = STALE | {"train.mode": "bounded", "train.max_staleness": 2}
STAGED = {"weights.staged": True}
SEVERAL = {"train.devices": []}
CASES = {
    "sync": ({"train.mode": "sync"}, 0),
    "periodic": ({}, 0),
    "updates": ({"train.updates": 4, "algorithm.old_policy": "behavior"}, 0),
    "one_step_off": (OFF, 1),
    "one_step_off_staged": (OFF | STAGED, 1),
    "bounded": (BOUNDED, 2),
    "bounded_staged": (BOUNDED | STAGED, 2),
    "exact_lag": (BOUNDED | {"train.exact_lag": True}, 2),
    "replicas": (SEVERAL | {"parallel.data": 2}, 0),
    "pipeline": (SEVERAL | {"parallel.pipeline": 2}, 0),
    "evaluation": ({"evaluate.every": 1, "evaluate.problems": 40, "evaluate.samples": 4}, 0),
}
"""What a run has beside the recipe, and how many versions before the step's its responses may have."""
EACH_TIME = ("sync", "periodic", "one_step_off", "exact_lag")
ALONE = {"replicas", "pipeline", "updates"}
"""Whose numbers are not those of `periodic`."""


def recipe(settings, folder, more):
    return elastic_job.exact_recipe(settings, folder, STEPS) | {"evaluate.max_new_tokens": 40, **more}


@pytest.fixture(scope="module")
def undisturbed(tiny_model, problems, tmp_path_factory):
    """Returns the final weights of a run that nothing happens to."""

    @cache
    def weights_of(name):
        folder = tmp_path_factory.mktemp(name)
        run(recipe(base_settings(tiny_model, problems, folder), folder, CASES[name][0]), folder)
        return weights(folder, "run")

    return weights_of


@pytest.mark.parametrize(
    "name", [name if name in EACH_TIME else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)
def test_the_only_instance_dies_in_the_middle_of_a_step(settings, tmp_path, undisturbed, name):
    more, lag = CASES[name]
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(Job(recipe(settings, tmp_path, more), tmp_path))
        job.wait(lambda: job.steps() >= 2 and job.works("instance-0") and _is_there(job, name), "its work")
        kill(job, "instance-0")
        lines = job.end(lag)
    assert lines[-1]["pool_size"] == 1
    assert job.periods("instance-0").count("starting") == 2
    if not lag:
        assert same(weights(tmp_path, "run"), undisturbed(name if name in ALONE else "periodic"))


def _is_there(run, name):
    """Whether the instance samples what it is to sample when it dies: an evaluation, which begins when all groups of
    the step have arrived."""
    found = run.call("/status")
    return name != "evaluation" or (found["instances"][0]["groups"] and set(found["arrived"]) <= {PROMPTS})


@pytest.mark.nightly
def test_the_only_instance_of_a_service_dies_in_the_middle_of_a_step(settings):
    rows = []
    exact = {"train.consume": "prompt_order", "rollout.deterministic": True, "rollout.concurrency": 1}
    for name in ("undisturbed", "killed"):
        rows.append([])
        config = config_of(settings | exact | {"run.name": name, "rollout.max_new_tokens": 40})
        with ServiceClient.init_engines(config) as service:
            trainer = HuggingFaceTrainer(service.config)
            report = lambda step, figures: rows[-1].append((step, figures["groups"], figures["grad_norm"]))  # noqa: E731
            training = threading.Thread(
                target=Loop(service.config, trainer, LiveRollouts.of(service), report).run, daemon=True
            )
            training.start()
            if name == "killed":
                wait_for(lambda: rows[-1] and _status(service)["instances"][0]["groups"], "work")
                Tree(service._child.pid).named("engine.instance.embedded").kill()
            training.join(150)
            assert not training.is_alive()
    assert rows[0] == rows[1]
    assert len(rows[1]) == settings["train.steps"]


def _status(service):
    right = authorization_headers(folder_token(str(service.config.folder)))
    return httpx.get(f"{service.connection.url}/status", headers=right).json()
