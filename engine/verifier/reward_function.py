"""From `reward.function` to a callable; runs in the verifier process, not in the launcher: it runs a user's code."""

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
    """As the config names it."""
    call: Callable[..., Any]
    """(prompt, responses) -> list[float | Score], if `per_response` (prompt, response) -> float | Score; or async."""
    per_response: bool
    file: str
    """Where it is defined; the frame that an error report points to."""


def load_reward(spec: str) -> RewardFunction:
    """Load "math", "exact", "file.py:function" (path as `recipe.find`) or "package.module:function".

    Raises BadInput naming spec, file and the original error.
    """
    if spec in BUILT_IN:
        _warm(spec)
        return _reward(spec, BUILT_IN[spec])
    return _reward(spec, *load_function("reward.function", spec, '"math", "exact"', "(prompt, responses)"))


def _reward(spec: str, function: Callable[..., Any], file: str = "") -> RewardFunction:
    code = getattr(inspect.unwrap(function), "__code__", None)
    defined_in = code.co_filename if code is not None else file
    return RewardFunction(spec, function, bool(getattr(function, "per_response", False)), defined_in)


def _warm(spec: str) -> None:
    """Let the verifier import and compile what it needs before the first response is on the clock."""
    prompt = Prompt("", "", "x + 1", ())  # a formula: numbers don't need SymPy
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
