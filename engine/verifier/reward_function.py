"""Loads the reward's functions in the verifier process, never in the orchestrator, because this runs a user's code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.reward.verifiers import BUILT_IN
from engine.run.user_code import load_function
from engine.types import Prompt, Response
from engine.verifier.signatures import adapt_reward
from engine.wire.verifier_messages import WeightedFunction


@dataclass(frozen=True)
class RewardFunction:
    """A reward, ready to be called."""

    spec: str
    """The function as the recipe names it."""
    call: Callable[..., Any]
    """(prompt, responses) -> list[float | Score | dict]; if `per_response`, (prompt, response) -> float | Score | dict;
    or async."""
    per_response: bool
    file: str
    """The file that defines the reward. Error messages name the innermost line in this file."""
    may_skip: bool = False
    """Whether None is a score: the function does not apply to the response."""
    weight: float = 1.0
    name: str = ""
    """Its name among reward.functions; empty for `reward.function`, which is not logged beside the score."""


def load_reward(spec: str, key: str = "reward.function") -> RewardFunction:
    """Load "math", "exact", "file.py:function" (path as in `recipe.find_file`) or "package.module:function", of any
    signature of `engine.verifier.signatures`.

    Raises BadInput, naming key, spec, file and the original error.
    """
    if spec in BUILT_IN:
        _warm_up(spec)
        return RewardFunction(spec, BUILT_IN[spec], per_response=True, file="")
    function, file = load_function(key, spec, '"math", "exact"', "(prompt, responses)")
    code = getattr(inspect.unwrap(function), "__code__", None)
    adapted = adapt_reward(function, f'{key} = "{spec}"')
    return RewardFunction(
        spec=spec,
        call=adapted.call,
        per_response=adapted.per_response,
        file=code.co_filename if code is not None else file,
        may_skip=adapted.may_skip,
    )


def load_rewards(functions: Sequence[WeightedFunction]) -> list[RewardFunction]:
    """Load all functions of a reward, as `load_reward` does."""
    loaded = []
    for one in functions:
        reward = load_reward(one.function, "reward.functions: function" if one.name else "reward.function")
        loaded.append(replace(reward, weight=one.weight, name=one.name))
    return loaded


def _warm_up(spec: str) -> None:
    """Call a built-in verifier once, so that it imports and compiles what it needs before the first timed call."""
    prompt = Prompt("", "", "x + 1", ())  # a formula, since numbers don't need SymPy
    BUILT_IN[spec](
        prompt,
        Response(
            token_ids=(),
            logprobs=(),
            versions=(),
            loss_mask=(),
            finish_reason="stop",
            text="\\boxed{1 + x}",
            seed=0,
            instance="",
        ),
    )
