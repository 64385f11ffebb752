"""The built-in rewards. They read only `prompt.answer` and `response.text`, and return 1 or 0."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from engine.reward.equality import same
from engine.reward.formulas import extract, verified
from engine.types import Prompt, Response, Score

_TAIL = 2_000
"""Number of characters at the end of an unboxed response that are searched. math-verify's patterns take quadratic time
(24 s for 64,000 characters)."""
_DETAIL = 200
"""Number of characters of the extracted answer in a score's detail."""
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_FORMULA = re.compile(r"(?<!\\)\$\$(.+?)(?<!\\)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
_AND = re.compile(r"\s*,?\s*(?:and|or)?\s*")
_NEAR = 100
"""Largest distance in characters between the word "answer" and the formula that belongs to it."""


def per_response(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a reward that is called as `(prompt, response) -> float | Score`, once for each response when it arrives."""
    function.per_response = True  # type: ignore[attr-defined]
    return function


@per_response
def exact(prompt: Prompt, response: Response) -> Score:
    """1 if the text after the last "#" is the answer; without "#", if the last non-empty line is. Blanks around are
    ignored."""
    marked = response.text.rpartition("#")
    found = marked[2].strip() if marked[1] else (response.text.strip().splitlines() or [""])[-1].strip()
    return Score(float(found == prompt.answer.strip()), detail=found[:_DETAIL])


@per_response
def math(prompt: Prompt, response: Response) -> Score:
    r"""1 if the last `\boxed{…}` of the response is the answer; without one, if its final expression is
    (`equality.same`)."""
    found = last_boxed(response.text)
    shown = found if found is not None else stated(response.text[-_TAIL:])
    try:
        right = _right(prompt.answer, shown, plain=found is None)
    except (RecursionError, MemoryError) as error:  # no answer needs this much, see engine.verifier.worker.MEMORY
        return Score(0.0, detail=f"{type(error).__name__}: {shown[:_DETAIL].strip()}")
    return Score(float(right), detail=shown[-_DETAIL:].strip())


@per_response
def math_verify(prompt: Prompt, response: Response) -> Score:
    """1 if math-verify alone, with its own extraction, finds the answer in the response: a figure to compare with
    others who use it so (verl, TRL)."""
    try:
        right = verified(prompt.answer, response.text)
    except (RecursionError, MemoryError) as error:
        return Score(0.0, detail=type(error).__name__)
    return Score(float(right))


def last_boxed(text: str) -> str | None:
    r"""The content of the `\boxed{…}` that closes last, with balanced braces; None if there is none. Takes linear
    time."""
    opened: list[tuple[bool, int]] = []  # for each open brace: whether \boxed opened it, where its content starts
    found: str | None = None
    for token in _BRACES.finditer(text):
        if token[0] == "{" or token[0].startswith("\\boxed"):
            opened.append((token[0] != "{", token.end()))
        elif token[0] == "}" and opened:
            boxed, start = opened.pop()
            found = text[start : token.start()] if boxed else found
    return found


def stated(text: str) -> str:
    """The formulas after the last "answer", else the last formula, else the text after the last "answer", else the
    whole text."""
    anchor = text.lower().rfind("answer")
    behind = text[anchor + len("answer") :] if anchor >= 0 else text
    formulas = list(_FORMULA.finditer(behind))
    if not formulas:
        return behind
    if anchor < 0:
        return _joined(behind, formulas[-1:])
    return _joined(behind, formulas) if formulas[0].start() < _NEAR else behind[: formulas[0].start()]


def _joined(text: str, formulas: list[re.Match[str]]) -> str:
    """The first formula, and the formulas that follow it after only a comma or "and"."""
    parts = [formulas[0]]
    for formula in formulas[1:]:
        if not _AND.fullmatch(text[parts[-1].end() : formula.start()]):
            break
        parts.append(formula)
    return ", ".join(next(filter(None, part.groups())) for part in parts)


def _right(answer: str, shown: str, plain: bool) -> bool:
    gold = last_boxed(answer)
    gold = answer if gold is None else gold
    if same(gold, shown):
        return True
    if not plain or _FORMULA.search(shown):
        return False
    return any(isinstance(found, str) and same(gold, found) for found in extract(shown))


BUILT_IN: dict[str, Callable[..., Any]] = {"math": math, "exact": exact, "math_verify": math_verify}
"""Rewards that are named without a module."""
