"""Defines a rule of the conformance suite."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from engine.errors import MetronomeError
from engine.tools.conformance.tried_engine import TriedEngine


class RuleBroken(MetronomeError):
    """The engine breaks the rule; the message says what was seen."""


Check = Callable[[TriedEngine], Awaitable[str]]
"""Tries the rule and returns what it saw. Raises RuleBroken (or an error of a call) if the rule does not hold."""


@dataclass(frozen=True)
class ProtocolRule:
    """One rule of the protocol."""

    name: str
    text: str
    """The rule in a sentence."""
    check: Check
    required: bool
    """Whether every run relies on it."""


def rule(name: str, text: str, required: bool = True) -> Callable[[Check], ProtocolRule]:
    """Turn a check into a rule."""
    return lambda check: ProtocolRule(name, text, check, required)


def demand(holds: bool, words: str) -> None:
    """Raise RuleBroken with these words unless `holds` is true."""
    if not holds:
        raise RuleBroken(words)
