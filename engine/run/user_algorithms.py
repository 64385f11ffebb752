"""Loads advantages, losses and gradient controls by name, or a user's own by "file.py:function". A user's own is tried
once before training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

import torch

from engine.algorithm.advantages import ADVANTAGES, Advantage
from engine.algorithm.alignment import CONTROLS, Control, Step
from engine.algorithm.batch_statistics import BatchTokens
from engine.algorithm.losses import LOSSES, Loss, PolicyLoss, Terms
from engine.config import Algorithm
from engine.errors import BadInput
from engine.run.user_code import UserCode, describe_error, load_function


@cache
def advantage_of(spec: str) -> Advantage:
    """The advantage of `algorithm.advantage`. A user's function takes (rewards [G], lengths [G]: the trained
    tokens of each response) and returns [G].

    Raises BadInput with the reason if the function cannot be loaded, fails on a group of four, or has scope "batch".
    """
    if spec in ADVANTAGES:
        return ADVANTAGES[spec]
    function, file = load_function("algorithm.advantage", spec, _names(ADVANTAGES), "(rewards, lengths)")
    found = next((known for known in ADVANTAGES.values() if known.compute is function), Advantage(function, least=1))
    with UserCode() as attempt:
        found(torch.tensor([1.0, 0.0, 0.5, 0.0]), torch.tensor([3.0, 1.0, 2.0, 2.0]))
    _check("algorithm.advantage", spec, file, attempt)
    if found.scope == "batch":
        raise BadInput(
            f'algorithm.advantage = "{spec}": scope "batch" is for built-in advantages; your own is called with one '
            "group"
        )
    return found


@cache
def find_loss(spec: str) -> PolicyLoss:
    """The loss of `algorithm.loss`. A user's function takes (terms, coefficients) and returns ([T] gains, [T] bool
    clipped).

    Its gains are summed like those of "grpo", unless its file registers it with `@loss(name, aggregation, statistics)`.
    Raises BadInput like `advantage_of`.
    """
    if spec in LOSSES:
        return LOSSES[spec]
    function, file = load_function("algorithm.loss", spec, _names(LOSSES), "(terms, coefficients)")
    found = next((known for known in LOSSES.values() if known.gain is function), PolicyLoss(function))
    with UserCode() as attempt:
        _try(found)
    _check("algorithm.loss", spec, file, attempt)
    return found


@cache
def control_of(spec: str) -> Control:
    """The gradient control of `algorithm.gradient_control`. A user's function takes a Step and returns a factor or
    None.

    Raises BadInput like `advantage_of`, and if the function fails at one of a few test cosines, or returns neither None
    nor a finite number.
    """
    if spec in CONTROLS:
        return CONTROLS[spec]
    function, file = load_function("algorithm.gradient_control", spec, _names(CONTROLS), "(step)")
    with UserCode() as attempt:
        for count, cosine in enumerate((0.0, 0.02, -0.2, 0.9, -1.0)):
            call_control(function, Step(cosine, [0.1] * count, 0.05, 0.3))
    _check("algorithm.gradient_control", spec, file, attempt)
    return function


def try_algorithms(advantage: str, loss: str, control: str) -> None:
    """Load a run's advantage, loss and gradient control, and try the user's own. Raises BadInput."""
    advantage_of(advantage)
    find_loss(loss)
    if control != "none":
        control_of(control)


def call_control(decide: Control, step: Step) -> float | None:
    """The decision of a gradient control. Raises ValueError unless it is None or a finite number."""
    found = decide(step)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise ValueError(
            f"a gradient control returns a finite number or None, got {found!r} for the cosine {step.cosine:g}"
        )
    return float(found)


def _try(loss: PolicyLoss) -> None:
    """Call the loss on two responses, of two tokens and one. Raises ValueError for a wrong result."""
    logprobs = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True)
    old = torch.tensor([-1.1, -0.5, -1.9])
    ones = torch.ones(3)
    advantages = torch.tensor([1.0, 1.0, -1.0])
    number = torch.tensor([0, 0, 1])
    coefficients = Algorithm()
    tokens = BatchTokens((logprobs - old).detach(), advantages)
    statistics = loss.statistics(tokens, coefficients) if loss.statistics is not None else ()
    weights = torch.tensor([0.5, 0.5, 1.0])
    terms = Terms(
        logprobs=logprobs,
        old=old,
        reference=None,
        entropy=ones,
        advantages=advantages,
        weights=weights,
        rollout=old,
        response=number,
        responses=2,
        statistics=statistics,
    )
    gain, clipped = loss.gain(terms, coefficients)
    if gain.shape != (3,) or clipped.shape != (3,):
        raise ValueError(
            f"for 3 tokens it returned gains of shape {list(gain.shape)} and clipped of shape {list(clipped.shape)}"
        )
    result: Loss = loss(terms, coefficients)
    result.total.backward()
    if logprobs.grad is None or not bool(torch.isfinite(logprobs.grad).all()):
        raise ValueError("its gains carry no finite gradient of terms.logprobs")


def _names(known: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in known)


def _check(key: str, spec: str, file: str, attempt: UserCode) -> None:
    if attempt.error is not None:
        raise BadInput(f'{key} = "{spec}": it failed in a trial call: {describe_error(attempt.error, file)}')
