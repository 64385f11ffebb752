"""Responses that a weight update cuts and that go on under the new weights (rollout.partial), in whole runs."""

import math

import pytest

from engine.wire import record
from support.parallel.runs import Job, run
from support.runs import config_of
from support.whole_runs import same, steps, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS = 6
PROMPTS = 4
LAG = {"one_step_off": 1, "bounded": 2}


def test_a_response_carries_the_versions_of_its_tokens_and_is_trained_once(settings, tmp_path):
    base = settings | {
        "rollout.partial": True,
        "train.record": True,
        "train.steps": STEPS,
        "train.prompts_per_step": PROMPTS,
        "rollout.max_new_tokens": 120,
        "rollout.max_context": 160,
        "rollout.concurrency": 1,
        "train.micro_batch_tokens": 1000,
        "algorithm.old_policy": "rollout",
        "algorithm.kl_coef": 0,
        "rollout.timeout_s": 300,
        "train.timeout_s": 300,
    }
    modes = {"one_step_off": {"weights.staged": False}, "bounded": {"weights.staged": True, "train.max_staleness": 2}}
    jobs = [Job(config_of(base | {"run.name": mode, "train.mode": mode} | more)) for mode, more in modes.items()]
    replay = base | modes["bounded"] | {"run.name": "replay", "train.mode": "bounded", "train.record": False}
    run([*jobs, Job(config_of(replay), replay="bounded")], 250)
    for mode in modes:
        check_run(tmp_path, mode, LAG[mode])
    assert same(weights(tmp_path, "bounded"), weights(tmp_path, "replay"))


def check_run(folder, name, lag):
    lines = steps(folder, name)
    groups = [group for entry in record.read_record(folder / name / "record.msgpack") for group in entry.window()]
    assert sorted((group.step, group.index) for group in groups) == [
        (s, p) for s in range(STEPS) for p in range(PROMPTS)
    ]
    cut = {
        step: check(step, [one for group in groups if group.step == step for one in group.responses], lag)
        for step in range(STEPS)
    }
    assert sum(cut.values()) > 0
    assert [line["continued"] for line in lines] == [cut[step] for step in range(STEPS)]
    assert all(math.isfinite(line[key]) for line in lines for key in ("loss", "grad_norm", "mismatch_kl"))
    assert all(line["grad_norm"] > 0 for line in lines)


def check(step, responses, lag):
    """No token is older than the mode allows, versions only rise, and every token has its log-probability;
    how many were cut."""
    assert len(responses) == 4 * PROMPTS
    for one in responses:
        starts, versions = zip(*one.versions, strict=True)
        assert starts[0] == 0
        assert list(starts) == sorted(set(starts))
        assert starts[-1] < len(one.token_ids) <= 120
        assert len(one.logprobs) == len(one.token_ids)
        assert list(versions) == sorted(set(versions))
        assert max(0, step - lag) <= versions[0] <= versions[-1] <= step
    return sum(len(one.versions) > 1 for one in responses)
