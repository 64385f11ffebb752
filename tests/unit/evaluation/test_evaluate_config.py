"""The keys of `evaluate`."""

import pytest
from pydantic import ValidationError

from engine.config import Config, Evaluate


def test_benchmarks_as_a_list_or_by_commas():
    assert Evaluate(benchmark=["aime24", "a/b.jsonl"]).benchmarks == ["aime24", "a/b.jsonl"]
    assert Evaluate(benchmark=" aime24 , math500,").benchmarks == ["aime24", "math500"]
    assert Evaluate(benchmark="data/mine.jsonl").benchmark == "data/mine.jsonl"
    assert Evaluate().benchmarks == []
    with pytest.raises(ValidationError, match="benchmark"):
        Evaluate(benchmark=[1])


@pytest.mark.parametrize("mode", ["one_step_off", "bounded"])
def test_modes_without_a_drain_are_refused(mode):
    with pytest.raises(ValidationError, match=f'train.mode = "{mode}" keeps them busy'):
        Config.model_validate({"evaluate": {"every": 5}, "train": {"mode": mode}})
    Config.model_validate({"evaluate": {"every": 5}, "train": {"mode": "sync"}})
