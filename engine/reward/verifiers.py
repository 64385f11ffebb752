"""The built-in rewards. They read only `prompt.answer` and `response.text`, and return 1 or 0."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from engine.reward.extraction import boxed_answer, listed_boxes, stated_answers
from engine.reward.math.answers import tidy_answer
from engine.reward.math.canonical import canonical_latex, is_list, split_parts
from engine.reward.math.equality import same_answer
from engine.reward.math.formulas import LONGEST, verify_response
from engine.types import Prompt, Response, Score

_DETAIL = 200
"""Number of characters of the extracted answer in a score's detail."""
_WORDS = re.compile(r"\\text\{[^{}]*\}|\\[a-zA-Z]+")
_APPLIED = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]\([^()=]+\)")


def per_response(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a reward that is called as `(prompt, response) -> float | Score`, once for each response when it arrives."""
    function.per_response = True  # type: ignore[attr-defined]
    return function


@per_response
def exact(prompt: Prompt, response: Response) -> Score:
    """1 if the text after the last "#" is the answer; without "#", if the last non-empty line is. Surrounding blanks
    are ignored."""
    marked = response.text.rpartition("#")
    found = marked[2].strip() if marked[1] else (response.text.strip().splitlines() or [""])[-1].strip()
    return Score(float(found == prompt.answer.strip()), detail=found[:_DETAIL])


@per_response
def math(prompt: Prompt, response: Response) -> Score:
    r"""1 if the answer that the response states (`extraction.stated_answers`) is the answer (`equality.same_answer`).
    Several boxes also count if each of them is."""
    stated = next(iter(stated_answers(response.text)), "")
    gold = boxed_answer(prompt.answer)
    gold = prompt.answer if gold is None else gold
    boxes = listed_boxes(response.text)
    try:
        right = _states(stated, gold) or (len(boxes) > 1 and all(_states(box, gold) for box in boxes))
    except (RecursionError, MemoryError) as error:  # no real answer needs this much, see engine.verifier.worker.MEMORY
        return Score(0.0, detail=f"{type(error).__name__}: {stated[:_DETAIL].strip()}")
    return Score(float(right), detail=(stated or response.text)[-_DETAIL:].strip())


@per_response
def math_verify(prompt: Prompt, response: Response) -> Score:
    """1 if math-verify alone, with its own extraction, finds the answer in the response. Used to compare with others
    who use it in this way (verl, TRL)."""
    try:
        right = verify_response(prompt.answer, response.text)
    except (RecursionError, MemoryError) as error:
        return Score(0.0, detail=type(error).__name__)
    return Score(float(right))


def _states(found: str, gold: str) -> bool:
    """Whether a response's answer is the gold one."""
    return same_answer(gold, found) or (
        "=" not in gold and (value := _value(found)) is not None and same_answer(gold, value)
    )


def _value(found: str) -> str | None:
    """The value that an equation gives to what was asked for: 116 in m + n = 100 + 16 = 116. None if the first side has
    fewer than two variables and no f(2), because it may then be an equation to be solved."""
    first, *sides = split_parts(canonical_latex(tidy_answer(found)), "=") if len(found) <= LONGEST else [""]
    if (
        not sides
        or is_list(found)
        or re.search(r"[<>,]|not|\\(?:[lgn]e|to|in|equiv)(?![a-z])", first)
        or not (len(set(filter(str.isalpha, _WORDS.sub("", first)))) > 1 or _APPLIED.search(first))
    ):
        return None
    agree = all(same_answer(one, other) for one, other in zip(sides, sides[1:], strict=False))
    return sides[-1] if agree else None


BUILT_IN: dict[str, Callable[..., Any]] = {"math": math, "exact": exact, "math_verify": math_verify}
"""Rewards that can be named without a module."""
