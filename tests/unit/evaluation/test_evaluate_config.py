"""The keys of `evaluate`."""

import pytest
from pydantic import ValidationError

from engine.config import Evaluate


def test_benchmarks_as_a_list_or_by_commas():
    assert Evaluate(benchmark=["aime24", "a/b.jsonl"]).benchmarks == ["aime24", "a/b.jsonl"]
    assert Evaluate(benchmark=" aime24 , math500,").benchmarks == ["aime24", "math500"]
    assert Evaluate(benchmark="data/mine.jsonl").benchmark == "data/mine.jsonl"
    assert Evaluate().benchmarks == []
    with pytest.raises(ValidationError, match="benchmark"):
        Evaluate(benchmark=[1])
