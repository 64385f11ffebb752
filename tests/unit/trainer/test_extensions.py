"""A user's own advantage and loss by "file.py:function": what the documentation shows, and mistakes named."""

import re
from textwrap import dedent

import pytest
import torch
from conftest import ROOT

from engine.algorithm.advantages import ADVANTAGES
from engine.algorithm.losses import LOSSES
from engine.config import BATCH_SCOPE
from engine.errors import BadInput
from engine.recipe import load
from engine.trainer.extensions import advantage_of, loss_of


def written(folder, text):
    path = folder / f"own_{abs(hash(text))}.py"
    path.write_text("import torch\n" + dedent(text))
    return path


def shown(number):
    """The examples of the documentation, in order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs/algorithms.md").read_text(), re.S)[number]


def test_the_documented_advantage(tmp_path):
    path = written(tmp_path, shown(0))
    own = advantage_of(f"{path}:best_of")
    assert own(torch.tensor([0.5, 1.0]), torch.ones(2)).tolist() == [0.0, 1.0]
    assert load(None, [f"algorithm.advantage={path}:best_of"]).algorithm.advantage == f"{path}:best_of"


def test_the_documented_loss_and_its_aggregation(tmp_path):
    try:
        own = loss_of(f"{written(tmp_path, shown(1))}:reinforce")
        assert own.aggregation == "token"
        assert own is LOSSES["reinforce"]
    finally:
        LOSSES.pop("reinforce", None)


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
        ("terms.advantages.sum(), terms.advantages > 9", "for 3 tokens it gave gains of shape"),
        ("terms.advantages, terms.advantages > 9", "does not require grad|no finite gradient"),
        ("terms.logprobs / 0, terms.advantages > 9", "no finite gradient"),
        ("terms.logprobs", "it failed when it was tried"),
    ],
)
def test_a_wrong_loss_is_named(tmp_path, gives, said):
    with pytest.raises(BadInput, match=r"(?s)algorithm\.loss = .*" + f"({said})"):
        loss_of(f"{written(tmp_path, f'def own(terms, coefficients): return {gives}')}:own")


def test_an_unknown_name_says_what_there_is():
    with pytest.raises(BadInput, match=r"algorithm.advantage = 'nope'.*'grpo'.*file.py:function"):
        load(None, ["algorithm.advantage=nope"])
    with pytest.raises(BadInput, match=r"algorithm.loss = 'nope'.*'gspo'.*file.py:function"):
        load(None, ["algorithm.loss=nope"])


def test_the_config_knows_every_name():
    for name in ADVANTAGES:
        needs = ["train.mode=sync"] if name in BATCH_SCOPE else []
        assert load(None, [f"algorithm.advantage={name}", *needs]).algorithm.advantage == name


@pytest.mark.parametrize("mode", ["periodic", "one_step_off", "bounded"])
@pytest.mark.parametrize("name", BATCH_SCOPE)
def test_what_needs_the_whole_batch_is_refused_where_groups_are_trained_as_they_come(name, mode):
    with pytest.raises(BadInput, match=f'{name}" takes its statistics over the whole batch.*"sync", not "{mode}"'):
        load(None, [f"algorithm.advantage={name}", f"train.mode={mode}"])


def test_the_config_knows_every_loss():
    for name in LOSSES:
        assert load(None, [f"algorithm.loss={name}"]).algorithm.loss == name
