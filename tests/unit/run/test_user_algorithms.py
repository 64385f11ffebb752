"""A user's own advantage, loss, gradient control and verifier by "file.py:function":
what the docs show, and mistakes named."""

import re
from dataclasses import replace
from textwrap import dedent

import pytest
import torch

from engine.algorithm.advantages import ADVANTAGES
from engine.algorithm.alignment import CONTROLS, Step
from engine.algorithm.batch_statistics import BatchTokens
from engine.algorithm.losses import LOSSES
from engine.config import BATCH_SCOPE, BATCH_SCOPE_LOSSES, Algorithm
from engine.config.recipe import load_config
from engine.errors import BadInput
from engine.run.user_algorithms import advantage_of, control_of, find_loss
from engine.types import Prompt
from engine.verifier.reward_function import load_reward
from support.policies import response
from support.runs import ROOT


def written(folder, text):
    path = folder / f"own_{abs(hash(text))}.py"
    path.write_text("import torch\n" + dedent(text))
    return path


def shown(name, page="docs/algorithms.md"):
    """The page's example that defines `name`, of at most 20 lines."""
    examples = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    (example,) = [example for example in examples if f"def {name}(" in example]
    assert example.count("\n") < 20
    return example


def test_the_documented_advantage(tmp_path):
    path = written(tmp_path, shown("best_of"))
    own = advantage_of(f"{path}:best_of")
    assert own(torch.tensor([0.5, 1.0]), torch.ones(2)).tolist() == [0.0, 1.0]
    assert load_config(None, [f"algorithm.advantage={path}:best_of"]).algorithm.advantage == f"{path}:best_of"


def test_the_documented_loss_and_its_aggregation(tmp_path):
    try:
        own = find_loss(f"{written(tmp_path, shown('reinforce'))}:reinforce")
        assert own.aggregation == "token"
        assert own is LOSSES["reinforce"]
    finally:
        LOSSES.pop("reinforce", None)


def test_the_documented_loss_of_batch_scope(tmp_path):
    try:
        own = find_loss(f"{written(tmp_path, shown('centred'))}:centred")
        assert own.scope == "batch"
        tokens = BatchTokens(torch.tensor([0.0, 0.2]), torch.tensor([1.0, -1.0]))
        assert own.statistics(tokens, Algorithm()) == (pytest.approx(0.1),)
    finally:
        LOSSES.pop("centred", None)


def test_the_documented_gradient_control(tmp_path):
    path = written(tmp_path, shown("halve"))
    own = control_of(f"{path}:halve")
    assert own(Step(0.1, [0.2], None, None)) == 1.0
    assert own(Step(-0.6, [0.2], None, None)) == 0.5
    assert own(Step(0.6, [0.9, 0.9], None, None)) is None
    assert load_config(None, [f"algorithm.gradient_control={path}:halve"]).algorithm.gradient_control == f"{path}:halve"


def test_the_documented_verifier(tmp_path):
    reward = load_reward(f"{written(tmp_path, shown('reward', 'README.md'))}:reward")
    prompt = Prompt("p", "1+1=", "2", (1,))
    responses = [replace(response([1] * count), text=text) for count, text in ((10, "so 2"), (20, "3"))]
    assert reward.call(prompt, responses) == pytest.approx([0.99, -0.02])


def test_controls_are_registered_by_name():
    assert set(CONTROLS) == {"measure", "gac"}
    for name in CONTROLS:
        assert load_config(None, [f"algorithm.gradient_control={name}"]).algorithm.gradient_control == name
        assert control_of(name) is CONTROLS[name]


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        ("'skip'", "a finite number or None, got 'skip' for the cosine 0"),
        ("step.cosine / 0", "ZeroDivisionError"),
        ("float('nan')", "a finite number or None, got nan"),
        ("True", "a finite number or None, got True"),
        ("step.seen[3]", r"IndexError.*line 2"),
        ("None if step.cosine < -0.5 else step.angle", "has no attribute 'angle'"),
    ],
)
def test_a_wrong_control_is_named(tmp_path, gives, said):
    with pytest.raises(BadInput, match=r"algorithm\.gradient_control = .*" + said):
        control_of(f"{written(tmp_path, f'def own(step): return {gives}')}:own")


def test_ones_own_advantage_takes_a_group(tmp_path):
    body = """
        from engine.algorithm.advantages import advantage

        @advantage("own_batch", scope="batch")
        def own(rewards, lengths): return rewards - rewards.mean()
    """
    try:
        with pytest.raises(BadInput, match=r'scope "batch" is for built-in advantages'):
            advantage_of(f"{written(tmp_path, body)}:own")
    finally:
        ADVANTAGES.pop("own_batch", None)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def own(rewards, lengths): return rewards[:2]", "one finite number per response"),
        ("def own(rewards, lengths): return rewards / 0", "one finite number per response"),
        ("def own(rewards): return rewards", r"takes 1 positional argument"),
        ("def own(rewards, lengths): return helper(rewards)", r"NameError.*line 2"),
        ("def other(): pass", "defines no own"),
        ("own = 3", "is int, expected a function"),
        ("def own(:", "can't be loaded: SyntaxError"),
    ],
)
def test_a_wrong_advantage_is_named(tmp_path, body, said):
    with pytest.raises(BadInput, match=r"algorithm\.advantage = .*" + said):
        advantage_of(f"{written(tmp_path, body)}:own")


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        ("terms.advantages.sum(), terms.advantages > 9", "for 3 tokens it returned gains of shape"),
        ("terms.advantages, terms.advantages > 9", "does not require grad|no finite gradient"),
        ("terms.logprobs / 0, terms.advantages > 9", "no finite gradient"),
        ("terms.logprobs", "it failed in a trial call"),
    ],
)
def test_a_wrong_loss_is_named(tmp_path, gives, said):
    with pytest.raises(BadInput, match=r"(?s)algorithm\.loss = .*" + f"({said})"):
        find_loss(f"{written(tmp_path, f'def own(terms, coefficients): return {gives}')}:own")


def test_an_unknown_name_says_what_there_is():
    with pytest.raises(BadInput, match=r"algorithm.advantage = 'nope'.*'grpo'.*file.py:function"):
        load_config(None, ["algorithm.advantage=nope"])
    with pytest.raises(BadInput, match=r"algorithm.loss = 'nope'.*'gspo'.*file.py:function"):
        load_config(None, ["algorithm.loss=nope"])


NAMES = [
    *(("advantage", name, name in BATCH_SCOPE, []) for name in ADVANTAGES),
    *(("loss", name, name in BATCH_SCOPE_LOSSES, ["algorithm.old_policy=rollout"]) for name in LOSSES),
]
"""Key, name, whether it takes statistics over the whole batch, and what it needs then."""


@pytest.mark.parametrize(("key", "name", "batch", "needs"), NAMES)
def test_the_config_knows_every_name_and_refuses_batch_scope_in_periodic_alone(key, name, batch, needs):
    """In the modes that keep batches in flight a batch is there when its step begins: verl's one-step-off recipe lists
    both advantages of batch scope among its estimators."""
    given = [f"algorithm.{key}={name}", *(needs if batch else [])]
    for mode in ("sync", "one_step_off", "bounded") if batch else ("periodic",):
        assert getattr(load_config(None, [*given, f"train.mode={mode}"]).algorithm, key) == name
    if batch:
        with pytest.raises(BadInput, match=f'{name}" takes its statistics over the whole batch.*not "periodic"'):
            load_config(None, [*given, "train.mode=periodic"])


def test_the_losses_of_batch_scope_are_those_of_the_config():
    assert {name for name, loss in LOSSES.items() if loss.scope == "batch"} == set(BATCH_SCOPE_LOSSES)


@pytest.mark.parametrize("setting", ["bapo.low=[0.9, 0.6]", "bapo.high=[0.8, 2.0]", "bapo.high=[3.0, 1.2]"])
def test_bounds_that_make_no_range_are_refused(setting):
    with pytest.raises(BadInput, match=r"algorithm\.bapo\.(low|high) = .*expected the value where the bound starts"):
        load_config(None, [f"algorithm.{setting}"])
