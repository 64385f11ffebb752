"""Loads the reward's functions in the verifier process, never in the orchestrator, because this runs a user's code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import BadInput
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


def check_built_in(functions: Sequence[RewardFunction]) -> None:
    """Score right answers with each built-in verifier, under the limits that this process has by now.

    math-verify takes an answer that it could not parse for a wrong one, also where memory was short: without this check
    a machine on which it can't work would score every response 0. Raises BadInput.
    """
    for function in functions:
        for answer, text in _RIGHT.get(function.spec, ()):
            score = function.call(_prompt(answer), _response(text))
            if score.value != 1.0:
                raise BadInput(
                    f'the verifier "{function.spec}" scores {text!r} {score.value:g} for the answer {answer!r}; '
                    f"expected 1: it can't work here. Check the versions of math-verify, latex2sympy2_extended and "
                    f"SymPy (constraints.txt) and the memory limits of this machine"
                )


_RIGHT = {
    "math": [("x + 1", "\\boxed{1 + x}"), ("10", "There are 10 in the box."), ("\\frac{1}{2}", "So it is $0.5$.")],
    "math_verify": [("x + 1", "\\boxed{1 + x}"), ("10", "There are 10 in the box.")],
}


def _warm_up(spec: str) -> None:
    """Call a built-in verifier once, so that it imports and compiles what it needs before the first timed call."""
    BUILT_IN[spec](_prompt("x + 1"), _response("\\boxed{1 + x}"))  # a formula, since numbers don't need SymPy


def _prompt(answer: str) -> Prompt:
    return Prompt("", "", answer, ())


def _response(text: str) -> Response:
    return Response(
        token_ids=(),
        logprobs=(),
        versions=(),
        loss_mask=(),
        finish_reason="stop",
        text=text,
        seed=0,
        instance="",
    )
