"""Loads `reward.function` in the verifier process, never in the orchestrator, because this runs a user's code."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.reward.verifiers import BUILT_IN
from engine.run.user_code import load_function
from engine.types import Prompt, Response


@dataclass(frozen=True)
class RewardFunction:
    """A reward, ready to be called."""

    spec: str
    """The value of `reward.function`."""
    call: Callable[..., Any]
    """(prompt, responses) -> list[float | Score]; if `per_response`, (prompt, response) -> float | Score; or async."""
    per_response: bool
    file: str
    """The file that defines the reward. Error messages name the innermost line in this file."""


def load_reward(spec: str) -> RewardFunction:
    """Load "math", "exact", "file.py:function" (path as in `recipe.find_file`) or "package.module:function".

    Raises BadInput, naming spec, file and the original error.
    """
    if spec in BUILT_IN:
        _warm_up(spec)
        return _reward_function(spec, BUILT_IN[spec])
    return _reward_function(spec, *load_function("reward.function", spec, '"math", "exact"', "(prompt, responses)"))


def _reward_function(spec: str, function: Callable[..., Any], file: str = "") -> RewardFunction:
    code = getattr(inspect.unwrap(function), "__code__", None)
    defined_in = code.co_filename if code is not None else file
    return RewardFunction(spec, function, bool(getattr(function, "per_response", False)), defined_in)


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
