"""Loads the reward's functions in the verifier process, never in the orchestrator, because this runs a user's code.

A function has one of three signatures: Metronome's own, TRL's and verl's. The parameters' names decide which.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import BadInput
from engine.reward.verifiers import BUILT_IN
from engine.run.user_code import load_function
from engine.types import Prompt, Response
from engine.wire.verifier_messages import WeightedFunction

SIGNATURES = (
    "Metronome's (prompt, responses), or with @per_response (prompt, response)",
    "TRL's (prompts, completions, **columns)",
    "verl's (data_source, solution_str, ground_truth, extra_info)",
)
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
OTHERS = frozenset((*VERL, "prompts", "completions", "completion_ids"))
"""Names of parameters that no function with Metronome's own signature has."""
NO_COLUMNS = ("prompt", "completion", "completions")
"""Columns that TRL does not pass on."""


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
    of the three signatures.

    Raises BadInput, naming key, spec, file and the original error.
    """
    if spec in BUILT_IN:
        _warm_up(spec)
        return RewardFunction(spec, BUILT_IN[spec], per_response=True, file="")
    function, file = load_function(key, spec, '"math", "exact"', "(prompt, responses)")
    code = getattr(inspect.unwrap(function), "__code__", None)
    file = code.co_filename if code is not None else file
    own = RewardFunction(spec, function, bool(getattr(function, "per_response", False)), file)
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions in C have none
        return own
    names = signature.parameters.keys()
    if "completions" in names:
        return replace(own, call=_of_trl(function, signature), per_response=False, may_skip=True)
    if "solution_str" in names and not _required(signature) - set(VERL):
        return replace(own, call=_of_verl(function, signature), per_response=True)
    try:
        signature.bind(None, None)
    except TypeError:
        fits = False
    else:
        fits = not OTHERS & names
    if not fits:
        raise BadInput(
            f'{key} = "{spec}": its parameters are {signature}; a reward has one of these signatures: '
            f"{'; '.join(SIGNATURES)}"
        )
    return own


def _of_trl(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """Return TRL's reward as a function of a prompt and its responses.

    As in TRL's GRPOTrainer, each argument is a list with one entry per response, and each column of the data is an
    argument. If the row's prompt is a list of messages, each completion is one too.
    """

    def call(prompt: Prompt, responses: Sequence[Response]) -> Any:  # noqa: ANN401
        given = _trl_arguments(prompt, responses)
        if missing := _required(signature) - given.keys():
            raise TypeError(
                f"it takes {', '.join(sorted(missing))}, but the row has only the columns "
                f"{', '.join(map(str, prompt.columns))}"
            )
        return function(**_accepted(signature, given))

    return call


def _trl_arguments(prompt: Prompt, responses: Sequence[Response]) -> dict[str, Any]:
    shown = prompt.columns.get("prompt", prompt.problem)
    texts: list[Any] = [response.text for response in responses]
    if _is_conversation(shown):
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {"problem": prompt.problem, "answer": prompt.answer, **prompt.columns}
    count = len(responses)
    return {
        **{name: [value] * count for name, value in columns.items() if name not in NO_COLUMNS},
        "prompts": [shown] * count,
        "completions": texts,
        "prompt_ids": [list(prompt.token_ids)] * count,
        "completion_ids": [list(response.token_ids) for response in responses],
    }


def _is_conversation(prompt: object) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in prompt)
    )


def _of_verl(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """Return verl's reward as a function of a prompt and one response.

    The ground truth is `reward_model.ground_truth` of the row as in verl's data, else the answer. Without a column
    extra_info it gets all columns.
    """

    def call(prompt: Prompt, response: Response) -> Any:  # noqa: ANN401
        columns = prompt.columns
        model = columns.get("reward_model")
        given = {
            "data_source": columns.get("data_source", ""),
            "solution_str": response.text,
            "ground_truth": model.get("ground_truth", prompt.answer) if isinstance(model, Mapping) else prompt.answer,
            "extra_info": columns.get("extra_info", dict(columns)),
        }
        return function(**_accepted(signature, given))

    return call


def _required(signature: inspect.Signature) -> set[str]:
    """Return the names of the parameters without a default."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in variadic
    }


def _accepted(signature: inspect.Signature, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments that the function takes: all if it has `**kwargs`."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in signature.parameters}


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
            score = function.call(Prompt("", "", answer, ()), Response.of_text(text))
            if score.value != 1.0:
                raise BadInput(
                    f'the verifier "{function.spec}" scores {text!r} {score.value:g} for the answer {answer!r}; '
                    f"expected 1: it can't work here. Check the versions of math-verify, latex2sympy2_extended and "
                    f"SymPy (constraints.txt) and the memory limits of this machine"
                )


_RIGHT = {
    "math": [
        ("x + 1", "\\boxed{1 + x}"),
        ("10", "There are 10 boxes."),
        ("\\frac{1}{2}", "So it is $0.5$."),
        ("\\frac{\\sqrt{3}}{2}", "\\boxed{\\sin 60^\\circ}"),
    ],
    "math_verify": [("x + 1", "\\boxed{1 + x}"), ("10", "There are 10 boxes.")],
}


def _warm_up(spec: str) -> None:
    """Call a built-in verifier once on a formula, so that it imports all it needs before the first timed call."""
    BUILT_IN[spec](Prompt("", "", "x + 1", ()), Response.of_text("\\boxed{1 + x}"))
