"""[stages.NAME]: what a recipe may declare, what follows from it, and how its mistakes are named."""

import pytest

from engine.config import Stage
from engine.config.recipe import load_config
from engine.config.stages import OWN_COLUMNS, REFERENCE_COLUMN, ROUTES_COLUMN
from engine.config.tree import Tree
from engine.errors import BadInput
from engine.run.folder import dump_config
from engine.wire import columns, routes

RECIPE = """
[algorithm]
kl_coef = 0.1
[stages.judge]
needs = ["prompt", "responses", "reference_logprobs"]
gives = ["quality"]
reward_weight = -0.5
[stages.language]
gives = ["language", "script"]
[stages.reference]
data = 2
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "mine.toml").write_text(RECIPE)
    return tmp_path / "mine.toml"


def test_the_columns_are_those_of_the_plane():
    assert set(OWN_COLUMNS) == set(columns.OWN)
    assert REFERENCE_COLUMN == columns.REFERENCE
    assert ROUTES_COLUMN == routes.ROUTES


def test_a_recipe_with_stages_is_read_changed_by_set_and_written_as_it_is(recipe, tmp_path):
    config = load_config(recipe, ["stages.judge.reward_weight=0.5", "stages.reference.tensor=2", "run.name=x"])
    assert config.stages["judge"] == Stage(
        needs=["prompt", "responses", "reference_logprobs"], gives=["quality"], reward_weight=0.5
    )
    assert config.reward_weights == {"quality": 0.5}
    assert config.reference_stage.ranks == 4
    dump_config(config, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == config


def test_a_recipe_without_stages_takes_one_by_set_and_is_written_as_it_is(tmp_path):
    dump_config(load_config(None, ["run.name=x"]), tmp_path / "config.toml")
    without = load_config(tmp_path / "config.toml")
    assert (without.stages, without.reward_weights, without.reference_stage) == ({}, {}, None)
    given = ['stages.judge={gives=["quality"]}', "stages.judge.reward_weight=2"]
    assert load_config(tmp_path / "config.toml", given).reward_weights == {"quality": 2.0}


def test_cores_are_shared_evenly_with_the_ranks_of_the_reference(monkeypatch):
    monkeypatch.setattr("engine.config.tree.usable_cores", lambda: set(range(12)))
    alone = Tree(parallel={"data": 2})
    assert (alone.trainer_threads, alone.instance_threads) == (4, 4)
    beside = Tree(parallel={"data": 2}, stages={"reference": {"pipeline": 3}})
    assert (beside.trainer_threads, beside.instance_threads, beside.scorer_threads) == (2, 2, 2)
    own = Tree(stages={"reference": {"context": 2, "devices": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]}})
    assert own.scorer_threads == 5


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("stages.judge.reward_weigth=1", "unknown key stages.judge.reward_weigth; did you mean stages.judge.reward_w"),
        ("stage.judge.reward_weight=1", "unknown key stage; did you mean stages?"),
        ("stages.judge.reward_weight=much", "stages.judge.reward_weight = 'much': must be a number"),
        ("stages.judge.lease_s=0", "stages.judge.lease_s = 0: must be greater than 0"),
        ("stages.judge.gives=quality", "stages.judge.gives = 'quality': must be a list"),
        ("stages.judge.gives=[1]", "stages.judge.gives.0 = 1: must be a string"),
        ("stages.other=3", "stages.other = 3: must be a table"),
        ("stages.gives=1", "stages.gives = 1: must be a table"),
    ],
)
def test_a_mistake_in_a_stage_names_its_key(recipe, override, said):
    with pytest.raises(BadInput) as error:
        load_config(recipe, [override])
    assert str(error.value).startswith(f"--set: {said}")
