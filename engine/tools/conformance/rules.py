"""What a rule of the conformance suite is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from engine.errors import MetronomeError
from engine.tools.conformance.tried_engine import TriedEngine


class RuleBroken(MetronomeError):
    """The engine does not keep the rule; the message says what was seen."""


Check = Callable[[TriedEngine], Awaitable[str]]
"""It tries the rule, returns what it saw, and raises RuleBroken (or an error of a call) if the rule does not hold."""


@dataclass(frozen=True)
class ProtocolRule:
    """One rule of the protocol."""

    name: str
    text: str
    """The rule in a sentence."""
    check: Check
    required: bool
    """Whether a run relies on it in any case."""


def rule(name: str, text: str, required: bool = True) -> Callable[[Check], ProtocolRule]:
    """Make a check a rule."""
    return lambda check: ProtocolRule(name, text, check, required)


def demand(holds: bool, words: str) -> None:
    """Raise RuleBroken with these words unless it holds."""
    if not holds:
        raise RuleBroken(words)
