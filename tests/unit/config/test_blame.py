"""A mistake is blamed on the place where it was made, in words."""

import re

import pytest

from engine.config.recipe import load_config
from engine.errors import BadInput


@pytest.fixture
def refusal(tmp_path):
    """The message of a recipe and overrides that are refused, and the recipe's path."""

    def said(text, *overrides):
        (tmp_path / "mine.toml").write_text(text)
        with pytest.raises(BadInput) as error:
            load_config(tmp_path / "mine.toml", overrides)
        return str(error.value)

    return said


RECIPE = "[rollout]\nmax_context = 64\nmax_new_tokens = 16\n"


@pytest.mark.parametrize(
    ("text", "overrides", "begins"),
    [
        (RECIPE, ["train.steps=-1"], "--set: train.steps = -1: "),
        (RECIPE, ["train.stepz=1"], "--set: unknown key train.stepz; did you mean train.steps?"),
        (RECIPE, ["rollout.max_context=8"], "--set: rollout.max_new_tokens (16) must be below rollout.max_context (8)"),
        (RECIPE, ["rollout.max_context.x=8"], "--set: rollout.max_context.x = 8: rollout.max_context = 64 is not a"),
        (RECIPE, ["run.name=a/b"], "--set: run.name = 'a/b': expected letters, digits, dots"),
        (RECIPE + "[train]\nsteps = -1\n", ["rollout.group_size=4"], "{file}: train.steps = -1: "),
        (RECIPE + "[train]\nsteps = -1\n", [], "{file}: train.steps = -1: "),
        ("[rollout]\nmax_context = 8\nmax_new_tokens = 16\n", ["train.steps=1"], "{file}: rollout.max_new_tokens (16)"),
        ("[rollout]\nmax_context = 8\nmax_new_tokens = 16\n", ["train.steps=-1"], "--set: train.steps = -1: "),
    ],
)
def test_a_mistake_of_set_is_blamed_on_set_and_one_of_the_file_on_the_file(refusal, tmp_path, text, overrides, begins):
    assert refusal(text, *overrides).startswith(begins.format(file=tmp_path / "mine.toml"))


@pytest.mark.parametrize("name", ["a b", ".hidden", "a/b", "é"])
def test_a_name_that_can_not_be_is_refused_in_words(name):
    with pytest.raises(BadInput) as error:
        load_config(None, [f"run.name={name}"])
    assert "expected letters, digits, dots, hyphens and underscores" in str(error.value)
    assert not re.search(r"[\[^$*]|pattern", str(error.value))
