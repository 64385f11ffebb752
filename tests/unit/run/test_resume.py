"""What a resume may do with each key, and what differs from a checkpoint."""

import json

import pytest

from engine.config import Config
from engine.config.recipe import load_config
from engine.errors import BadInput
from engine.run.resume import MARKS, check_continues, differences, keys_of
from support.runs import config_of

BY_MARK = {
    "place": "run.name run.output",
    "fixed": (
        "run.seed model.dtype model.head_dtype data.train data.columns.problem data.columns.answer "
        "data.heldout_fraction data.decontaminate data.prompt_template data.system data.instruction "
        "data.chat_template_kwargs rollout.group_size rollout.temperature train.prompts_per_step train.updates "
        "train.schedule train.betas algorithm.advantage algorithm.loss algorithm.old_policy algorithm.kl_coef "
        "algorithm.dynamic_sampling"
    ),
    "plan": (
        "rollout.max_new_tokens stages train.mode train.micro_batch_tokens train.learning_rate train.min_learning_rate "
        "train.warmup_steps train.weight_decay train.max_grad_norm train.dtype train.router_dtype "
        "train.recompute train.distributed_optimizer algorithm.clip_low algorithm.clip_high algorithm.dual_clip "
        "algorithm.m2po.threshold algorithm.bapo.share algorithm.bapo.low algorithm.bapo.high "
        "algorithm.routing_replay algorithm.kl_estimator algorithm.entropy_coef algorithm.overlong_buffer "
        "algorithm.overlong_penalty algorithm.gradient_control"
    ),
    "content": "model.path reward.function reward.functions rollout.program",
}
TABLES = ("algorithm", "attention", "parallel")
"""Tables whose further keys are of the plan."""
FIRST = {"run.name": "mine", "train.steps": 4}
WEIGHTED = '[{path = "a.jsonl", weight = 1.0}, {path = "b.jsonl", weight = %s}]'


@pytest.mark.parametrize("rule", BY_MARK)
def test_what_a_resume_may_do_with_a_key_is_said_on_it(rule):
    found = set(keys_of(rule))
    expected = set(BY_MARK[rule].split())
    assert expected <= found
    assert all(rule == "plan" and key.startswith(TABLES) for key in found - expected)


def state(step=2, **more):
    """Of a checkpoint of the run with the settings FIRST."""
    config = config_of(FIRST | more.pop("settings", {})).model_dump(mode="json")
    return {"step": step, "config": json.loads(json.dumps(config)), "prompts": "p", "prompt_position": 2} | more


@pytest.mark.parametrize(
    ("now", "then", "named"),
    [
        ({}, {}, []),
        ({"train.learning_rate": 0.5, "rollout.instances": 3, "train.mode": "sync", "run.accept": ["prompts"]}, {}, []),
        ({"run.seed": 3, "rollout.group_size": 2}, {}, ["run.seed", "rollout.group_size"]),
        ({"data.train": "elsewhere.jsonl", "data.decontaminate": ["benchmark"]}, {}, []),
        ({"train.steps": 1}, {}, ["train.steps"]),
        ({"train.learning_rate": 0.5, "train.recompute": 1}, {"step": 4}, ["train.learning_rate", "train.recompute"]),
        ({"train.learning_rate": 0.5, "train.steps": 5}, {"step": 4}, []),
        ({"data.train": "elsewhere.jsonl"}, {"prompts": None}, ["data.train"]),
        ({"data.train": "elsewhere.jsonl"}, {"step": 0, "prompts": None}, []),
        ({"algorithm.dynamic_sampling": True}, {"prompt_position": None}, ["algorithm.dynamic_sampling"] * 2),
    ],
)
def test_what_differs_is_named_by_its_key(now, then, named):
    assert [one.key for one in differences(config_of(FIRST | now), state(**then))] == named


@pytest.mark.parametrize(
    ("key", "then", "now", "stays"),
    [
        ("algorithm.loss", "/old/loss.py:own", "/new/loss.py:own", True),
        ("algorithm.loss", "/old/loss.py:own", "/old/loss.py:other", False),
        ("algorithm.loss", "/old/loss.py:own", "/old/losses.py:own", False),
        ("data.decontaminate", '["/old/a.jsonl"]', '["/new/a.jsonl"]', True),
        ("data.decontaminate", '["/old/a.jsonl"]', '["/old/b.jsonl"]', False),
        ("data.train", WEIGHTED % "1.0", (WEIGHTED % "1.0").replace("a.jsonl", "c.jsonl"), True),
        ("data.train", WEIGHTED % "1.0", WEIGHTED % "2.0", False),
    ],
)
def test_files_may_lie_elsewhere_but_what_a_key_names_besides_stays(key, then, now, stays):
    before = load_config(None, [f"{key}={then}"]).model_dump(mode="json")
    found = differences(load_config(None, [f"{key}={now}"]), {"step": 0, "config": before})
    assert [one.key for one in found] == ([] if stays else [key])


def test_the_model_and_the_inputs_of_a_checkpoint_are_compared():
    inputs = {"reward": {"named": "my.py:reward", "hash": "a", "path": ""}}
    before = state(model={"layers": 2}, inputs=inputs)
    assert differences(config_of(FIRST), before, inputs, {"layers": 2}) == []
    other = {"reward": inputs["reward"] | {"hash": "b"}}
    found = differences(config_of(FIRST), before, other, {"layers": 3})
    assert [(one.key, "layers" in one.why) for one in found] == [("model.path", True), ("run.accept", False)]
    assert differences(config_of(FIRST | {"run.accept": ["reward"]}), before, other) == []


def test_a_checkpoint_of_another_version_is_named():
    before = state()
    for key in MARKS:
        table, _, name = key.rpartition(".")
        if table in before["config"]:
            del before["config"][table][name]
    told = [one for one in differences(Config(), before) if "another version" in one.why]
    assert {one.key for one in told} >= {"run.seed", "algorithm.loss"}


def test_all_that_differs_is_said_at_once(tmp_path):
    config = config_of(FIRST | {"run.output": str(tmp_path), "run.seed": 1, "train.steps": 1})
    (config.folder / "policy").mkdir(parents=True)
    said = r"run\.seed is 1, but the run has 0.*\. the run has trained 2 steps already.*--set model\.path=.*/policy"
    with pytest.raises(BadInput, match=said):
        check_continues(config, state())
