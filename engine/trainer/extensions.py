"""Advantages and losses by their name, or a user's own by "file.py:function"; a user's is tried once before it trains."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from engine.algorithm.advantages import ADVANTAGES, Advantage
from engine.algorithm.losses import LOSSES, Coefficients, Loss, PolicyLoss, Terms
from engine.errors import BadInput
from engine.user_code import UserCode, describe, load_function


@cache
def advantage_of(spec: str) -> Advantage:
    """The advantage of `algorithm.advantage`. A user's function takes (rewards [G], lengths [G]) and gives [G].

    Raises BadInput with the reason for one that can't be loaded, or that fails on a group of four.
    """
    if spec in ADVANTAGES:
        return ADVANTAGES[spec]
    function, file = load_function("algorithm.advantage", spec, _names(ADVANTAGES), "(rewards, lengths)")
    found = next((known for known in ADVANTAGES.values() if known.compute is function), Advantage(function, least=1))
    with UserCode() as attempt:
        found(torch.tensor([1.0, 0.0, 0.5, 0.0]), torch.tensor([3.0, 1.0, 2.0, 2.0]))
    _check("algorithm.advantage", spec, file, attempt)
    return found


@cache
def loss_of(spec: str) -> PolicyLoss:
    """The loss of `algorithm.loss`. A user's function takes (terms, coefficients) and gives ([T] gains, [T] bool clipped).

    It is summed as "grpo" is, unless its file registers it with `@loss(name, aggregation)`. Raises BadInput as `advantage_of`.
    """
    if spec in LOSSES:
        return LOSSES[spec]
    function, file = load_function("algorithm.loss", spec, _names(LOSSES), "(terms, coefficients)")
    found = next((known for known in LOSSES.values() if known.gain is function), PolicyLoss(function))
    with UserCode() as attempt:
        _try(found)
    _check("algorithm.loss", spec, file, attempt)
    return found


def _try(loss: PolicyLoss) -> None:
    """Two responses of two tokens and one."""
    logprobs = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True)
    old, ones = torch.tensor([-1.1, -0.5, -1.9]), torch.ones(3)
    advantages, number = torch.tensor([1.0, 1.0, -1.0]), torch.tensor([0, 0, 1])
    terms = Terms(logprobs, old, None, ones, advantages, torch.tensor([0.5, 0.5, 1.0]), old, number)
    gain, clipped = loss.gain(terms, Coefficients(0.2, 0.2, 0.0, 0.0))
    if gain.shape != (3,) or clipped.shape != (3,):
        raise ValueError(f"for 3 tokens it gave gains of shape {list(gain.shape)} and clipped of shape {list(clipped.shape)}")
    result: Loss = loss(terms, Coefficients(0.2, 0.2, 0.0, 0.0))
    result.total.backward()
    if logprobs.grad is None or not bool(torch.isfinite(logprobs.grad).all()):
        raise ValueError("its gains carry no finite gradient of terms.logprobs")


def _names(known: dict[str, Any]) -> str:
    return ", ".join(f'"{name}"' for name in known)


def _check(key: str, spec: str, file: str, attempt: UserCode) -> None:
    if attempt.error is not None:
        raise BadInput(f'{key} = "{spec}": it failed when it was tried: {describe(attempt.error, file)}')
