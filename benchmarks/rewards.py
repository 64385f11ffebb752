"""A reward for Metronome and TRL. It is cheap to compute, and differs between the responses of a group."""

from __future__ import annotations

from typing import Any


def share_of_letters(text: str) -> float:
    """The share of ASCII letters among the characters."""
    return sum(character.isascii() and character.isalpha() for character in text) / max(1, len(text))


def letters(prompt: Any, responses: list[Any]) -> list[float]:  # noqa: ANN401
    """The reward in Metronome's form."""
    return [share_of_letters(response.text) for response in responses]


def letters_for_trl(completions: list[str], **unused: Any) -> list[float]:  # noqa: ANN401
    """The reward in TRL's form."""
    return [share_of_letters(completion) for completion in completions]
