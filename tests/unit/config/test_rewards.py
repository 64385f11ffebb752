"""Several reward functions in a recipe."""

import pytest

from engine.config.recipe import load_config
from engine.errors import BadInput
from engine.run.folder import dump_config

RECIPE = """
[reward]
timeout_s = 5

[[reward.functions]]
function = "math"

[[reward.functions]]
function = "mine.py:form"
weight = 0.2
name = "format"
"""


def test_functions_have_weights_and_names_and_take_the_place_of_the_default(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    reward = load_config(tmp_path / "recipe.toml").reward
    assert [(one.function, one.weight, one.name) for one in reward.named] == [
        ("math", 1.0, "math"),
        ("mine.py:form", 0.2, "format"),
    ]
    assert (reward.function, reward.label, reward.uses_math) == ("", "1 * math + 0.2 * mine.py:form", True)


def test_a_run_folders_config_reads_the_same(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    config = load_config(tmp_path / "recipe.toml", ["run.name=x"])
    dump_config(config, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (['[{function="a.py:f"}, {function="b.py:f"}]'], "two functions are called 'f': give each a name"),
        (['[{function="math", name="a b"}]'], "name = 'a b': a name has letters, digits"),
        (['[{function="math", name="a_std"}]'], "name = 'a_std': .* does not end in _std"),
        (['[{function="math", weights=2}]'], "unknown key reward.functions.0.weights"),
        (["[{weight=2}]"], r"reward.functions.0.function = .*: Field required"),
        (["math"], "reward.functions = 'math': must be a list"),
        (
            ['[{function="math"}]', "reward.function=exact"],
            'does not go with reward.function = "exact": give one of them; .* set reward.function = ""',
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_message(given, message):
    with pytest.raises(BadInput, match=message):
        load_config(None, [f"reward.functions={given[0]}", *given[1:]])
