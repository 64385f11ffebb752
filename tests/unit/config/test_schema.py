"""The schema by which editors complete and check recipes."""

import json
import re
import tomllib

import jsonschema
import pytest

from engine.config import Config
from engine.config.schema import SCHEMA, recipe_schema
from engine.config.table import NAME, keys_in

RECIPES = sorted(SCHEMA.parent.rglob("*.toml"))


@pytest.fixture(scope="module")
def checker():
    return jsonschema.Draft7Validator(json.loads(SCHEMA.read_text()))


def test_the_schema_is_current():
    assert json.loads(SCHEMA.read_text()) == recipe_schema(), (
        "infra/recipes/schema.json is old: python -m engine.config.schema > infra/recipes/schema.json"
    )


def test_every_recipe_names_the_schema_and_keeps_it(checker):
    assert len(RECIPES) > 20
    for recipe in RECIPES:
        text = recipe.read_text()
        line = re.match(r"#:schema (\S+)\n", text)
        assert line is not None, recipe
        assert (recipe.parent / line[1]).resolve() == SCHEMA, recipe
        checker.validate(tomllib.loads(text))


def test_the_defaults_keep_it_and_every_key_has_a_meaning(checker):
    checker.validate(json.loads(Config().model_dump_json()))
    for key in keys_in(Config):
        place = checker.schema
        for part in key.split("."):
            place = place["additionalProperties"] if part == NAME else place["properties"][part]
        assert len(place["description"]) >= 10, key


@pytest.mark.parametrize(
    "wrong",
    [
        "[train]\nlearnin_rate = 1e-6",
        "[trian]\nsteps = 2",
        '[train]\nsteps = "ten"',
        "[train]\nsteps = 0",
        "[train]\nsteps = 2147483648",
        '[train]\nmode = "async"',
        "[train]\nbetas = [0.9]",
        "[train]\nbetas = [0.9, 2.0]",
        "[stages.teacher]\nneds = []",
        "[evaluate]\nbenchmark = 3",
        "base = 1",
    ],
)
def test_a_wrong_key_and_a_wrong_value_do_not(checker, wrong):
    with pytest.raises(jsonschema.ValidationError):
        checker.validate(tomllib.loads(wrong))


@pytest.mark.parametrize(
    "right", ['[evaluate]\nbenchmark = ["aime24", "amc"]', "[run]\nseed = 4294967296", 'base = "x.toml"']
)
def test_what_a_recipe_may_say_keeps_it(checker, right):
    checker.validate(tomllib.loads(right))
