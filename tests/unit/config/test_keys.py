"""Dotted names of keys and trees of tables."""

import pytest

from engine.config.keys import flatten_keys, nest_keys
from engine.errors import BadInput


def test_keys_and_trees_are_each_others_reverse():
    tree = {"run": {"seed": 0}, "algorithm": {"loss": "bapo", "bapo": {"low": [0.5, 0.6]}}, "empty": {}}
    flat = {"run.seed": 0, "algorithm.loss": "bapo", "algorithm.bapo.low": [0.5, 0.6], "empty": {}}
    assert flatten_keys(tree) == flat
    assert nest_keys(flat, "") == tree
    with pytest.raises(BadInput, match=r"my\.toml: algorithm\.bapo\.share = 0\.4: algorithm\.bapo = 3 is not a table"):
        nest_keys({"algorithm.bapo": 3, "algorithm.bapo.share": 0.4}, "my.toml")


def test_an_empty_table_takes_keys_and_stays_as_it_was():
    flat = {"stages": {}, "stages.judge.gives": ["quality"]}
    assert nest_keys(flat, "") == {"stages": {"judge": {"gives": ["quality"]}}}
    assert flat["stages"] == {}
