"""DAPO's dynamic sampling in whole runs: which prompts are kept, where the next step goes on, resume and replay."""

from pathlib import Path

import pytest

from engine.config.inputs import Data
from engine.data.loader import PromptLoader
from engine.data.problems import read_problems
from engine.data.prompts import encode_problems
from engine.data.tokenizer import Tokenizer
from engine.errors import MetronomeError
from engine.wire import record
from support.parallel.runs import Job
from support.parallel.runs import run as run_jobs
from support.runs import ROOT, config_of
from support.whole_runs import run, same, steps, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS = 4
WANTED = 3
REWARDS = ROOT / "tests/support/rewards.py"


@pytest.fixture
def dynamic(settings):
    return settings | {
        "algorithm.dynamic_sampling": True,
        "reward.function": f"{REWARDS}:even_of_odd",
        "train.steps": STEPS,
        "train.prompts_per_step": WANTED,
        "rollout.concurrency": 4,
        "rollout.deterministic": True,
        "rollout.timeout_s": 300,
        "train.timeout_s": 300,
        "train.record": True,
    }


def trained(folder, name):
    """By step: ids of the prompts that were trained, by their index."""
    found = {}
    for entry in record.read_record(folder / name / "record.msgpack"):
        for group in entry.window():
            assert found.setdefault(entry.step, {}).setdefault(group.index, group.prompt.id) == group.prompt.id
    return {step: [ids[index] for index in range(WANTED)] for step, ids in found.items()}


def expected(settings):
    """(ids of kept prompts, prompts used) of each step, from the order of prompts and the reward alone."""
    tokenizer = Tokenizer(Path(settings["model.path"]))
    prompts = encode_problems(
        read_problems(settings["data.train"]), tokenizer, Data(), settings["rollout.max_context"]
    ).prompts
    loader = PromptLoader(prompts, 0, WANTED)
    position = 0
    found = []
    for _ in range(STEPS):
        kept = []
        first = position
        while len(kept) < WANTED:
            prompt = loader.at(position)[1]
            kept += [prompt.id] if int(prompt.problem.partition("+")[0]) % 2 else []
            position += 1
        found.append((kept, position - first))
    return found


def check(settings, folder, name):
    wanted = expected(settings)
    lines = steps(folder, name)
    assert [line["prompts_used"] for line in lines] == [used for _, used in wanted]
    assert trained(folder, name) == {step: kept for step, (kept, _) in enumerate(wanted)}
    assert all(line["equal_groups"] == 0 and line["grad_norm"] > 0 for line in lines)
    assert max(used for _, used in wanted) > WANTED


def test_what_is_kept_depends_on_prompt_order_alone_in_every_mode_and_a_resumed_run_goes_on_bit_for_bit(
    dynamic, tmp_path
):
    in_order = {"train.consume": "prompt_order"}
    stale = {"algorithm.kl_coef": 0, "algorithm.old_policy": "rollout"}
    modes = {
        "sync": in_order,
        "one_step_off": stale,
        "bounded": stale | {"train.max_staleness": 2},
    }
    jobs = [Job(config_of(dynamic | {"run.name": mode, "train.mode": mode} | more)) for mode, more in modes.items()]
    run_jobs(jobs, 300)
    for mode in modes:
        check(dynamic, tmp_path, mode)

    # more prompts are tried, the same are kept
    periodic = dynamic | in_order | {"run.name": "periodic", "rollout.instances": 2}
    for more, arguments in (({"train.steps": 2}, ()), ({}, ("--resume",))):
        run(periodic | more, tmp_path, *arguments)
    check(dynamic, tmp_path, "periodic")
    assert same(weights(tmp_path, "sync"), weights(tmp_path, "periodic"))


@pytest.mark.nightly  # tests/unit/orchestrator/test_dynamic_sampling.py has the rule
def test_a_run_whose_prompts_all_have_equal_rewards_ends_with_their_number(dynamic):
    with pytest.raises(MetronomeError, match=r"step 0: only 0 of 30 prompts have responses with different rewards"):
        run_jobs([Job(config_of(dynamic | {"reward.function": f"{REWARDS}:equal"}))], 300)


@pytest.mark.nightly
def test_replicas_that_train_in_order_of_arrival_replay_in_sync(dynamic, tmp_path):
    live = dynamic | {"parallel.data": 2, "train.micro_batch_tokens": 150, "run.name": "live"}
    again = live | {"run.name": "again", "train.record": False, "train.mode": "sync"}
    run_jobs([Job(config_of(live)), Job(config_of(again), replay="live")], 300)
    check(dynamic, tmp_path, "live")
    assert same(weights(tmp_path, "live"), weights(tmp_path, "again"))
    assert all("prompts_used" not in line for line in steps(tmp_path, "again"))
