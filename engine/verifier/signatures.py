"""The signatures that a reward may have: Metronome's own, TRL's and verl's. The parameters' names decide which."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import BadInput
from engine.types import Prompt, Response

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
class AdaptedReward:
    """A reward that is called as Metronome's own."""

    call: Callable[..., Any]
    """(prompt, responses), or (prompt, response) if `per_response`."""
    per_response: bool
    may_skip: bool = False
    """Whether None is a score: the function does not apply to the response."""


def adapt_reward(function: Callable[..., Any], where: str) -> AdaptedReward:
    """Return a function of any of the three signatures as one with Metronome's own.

    `where`: key and value that name the function, for messages. Raises BadInput if its parameters are of no signature.
    """
    own = AdaptedReward(function, bool(getattr(function, "per_response", False)))
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions in C have none
        return own
    names = signature.parameters.keys()
    if "completions" in names:
        return AdaptedReward(_of_trl(function, signature), per_response=False, may_skip=True)
    if "solution_str" in names and not _required(signature) - set(VERL):
        return AdaptedReward(_of_verl(function, signature), per_response=True)
    try:
        signature.bind(None, None)
    except TypeError:
        fits = False
    else:
        fits = not OTHERS & names
    if not fits:
        raise BadInput(
            f"{where}: its parameters are {signature}; a reward has one of these signatures: {'; '.join(SIGNATURES)}"
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
