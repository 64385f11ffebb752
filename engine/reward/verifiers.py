"""The built-in rewards. They read only `prompt.answer` and `response.text`, and return 1 or 0."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from engine.reward.math.answers import tidy_answer
from engine.reward.math.canonical import canonical_latex
from engine.reward.math.equality import MOST, same_answer
from engine.reward.math.formulas import LONGEST, extract_expressions, is_heavy, verify_response
from engine.reward.math.structure import is_list, split_parts
from engine.types import Prompt, Response, Score

_TAIL = 2_000
"""Number of characters at the end of an unboxed response that are searched, because math-verify's patterns take
quadratic time (24 s for 64,000 characters)."""
_DETAIL = 200
"""Number of characters of the extracted answer in a score's detail."""
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_FORMULA = re.compile(r"(?<!\\)\$\$(.+?)(?<!\\)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
_EMPHASIS = re.compile(r"(\*\*|__|`)(?=\S)([^\n]+?)(?<=\S)\1")
"""Markdown around a word or a formula."""
_WORDS = re.compile(r"\\text\{[^{}]*\}|\\[a-zA-Z]+")
_APPLIED = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]\([^()=]+\)")
_AND = re.compile(r"\s*,?\s*(?:and|or)?\s*")
_BLANK = r"(?:\s|\$|\\[()\[\],;!]|\\q?quad)*+"
_WORD = r"(?:\\text\{\s*)?(and|or|和|或)(?:\s*\})?"
_BETWEEN = re.compile(
    rf"{_BLANK}(?:[,;，；、]{_BLANK}(?:{_WORD})?|{_WORD}){_BLANK}(?:[a-zA-Z](?:_\{{?\w\}}?)?\s*=)?{_BLANK}"
)
"""Text that may stand between two boxes of one list."""
_JOINED = {"and": "and", "or": "or", "和": "and", "或": "or"}
_NAMED = re.compile(r"([a-zA-Z](?:_\{?\w\}?)?\s*=)\s*\$?\s*$")
_NEAR = 100
"""Largest distance in characters between the word "answer", or a box, and the formula that belongs to it."""


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
    r"""1 if the last `\boxed{…}` of the response is the answer (`final_answer`); without one, if its final expression
    is (`equality.same_answer`)."""
    boxes = _last_boxes(response.text)
    found = _joined_boxes(boxes)
    shown = found if found is not None else stated_answer(response.text[-_TAIL:])
    try:
        right = _right(prompt.answer, shown, plain=found is None) or (
            len(boxes) > 1 and all(_right(prompt.answer, box.content, plain=False) for box in boxes)
        )
    except (RecursionError, MemoryError) as error:  # no real answer needs this much, see engine.verifier.worker.MEMORY
        return Score(0.0, detail=f"{type(error).__name__}: {shown[:_DETAIL].strip()}")
    return Score(float(right), detail=shown[-_DETAIL:].strip())


@per_response
def math_verify(prompt: Prompt, response: Response) -> Score:
    """1 if math-verify alone, with its own extraction, finds the answer in the response. Used to compare with others
    who use it in this way (verl, TRL)."""
    try:
        right = verify_response(prompt.answer, response.text)
    except (RecursionError, MemoryError) as error:
        return Score(0.0, detail=type(error).__name__)
    return Score(float(right))


def final_answer(text: str) -> str | None:
    r"""The content of the last `\boxed{…}`. Boxes that are separated only by a comma, "and" or "or" are one list. None
    without a box.

    A name before a box of a list belongs to it: x=\boxed{1}, y=\boxed{2} is x=1, y=2. Equal boxes count once.
    """
    return _joined_boxes(_last_boxes(text))


def _joined_boxes(boxes: list[_Box]) -> str | None:
    return " ".join(part for box in boxes for part in box[2:]).strip() if boxes else None


def _last_boxes(text: str) -> list[_Box]:
    found = _boxes(text)
    first = len(found) - 1
    while first > 0 and (between := _between(text, found[first - 1], found[first])):
        first -= 1
        found[first] = found[first]._replace(joined=_JOINED.get(between[1] or between[2], ","))
    last = found[first:]
    if not 1 < len(last) <= MOST:
        return last[-1:]
    named = [_NAMED.search(text[max(0, box.start - _NEAR) : box.start]) for box in last]
    entries = {(name[1] if name else "") + box.content: box for name, box in zip(named, last, strict=True)}
    if len(entries) == 1:
        return last[-1:]
    listed = [box._replace(content=entry) for entry, box in entries.items()]
    return [*listed[:-1], listed[-1]._replace(joined="")]


def _between(text: str, one: _Box, other: _Box) -> re.Match[str] | None:
    return _BETWEEN.fullmatch(text, one.stop, other.start) if 0 <= other.start - one.stop < _NEAR else None


def last_boxed(text: str) -> str | None:
    r"""The content of the `\boxed{…}` that closes last, with balanced braces; None if there is none."""
    found = _boxes(text)
    return found[-1].content if found else None


class _Box(NamedTuple):
    start: int
    stop: int
    content: str
    joined: str = ""


def _boxes(text: str) -> list[_Box]:
    r"""Every `\boxed{…}` with balanced braces, in the order in which they close. Takes linear time."""
    opened: list[tuple[int, int]] = []  # for each open brace: start of \boxed, or -1; start of its content
    found: list[_Box] = []
    for token in _BRACES.finditer(text):
        if token[0] == "{" or token[0].startswith("\\boxed"):
            opened.append((token.start() if token[0] != "{" else -1, token.end()))
        elif token[0] == "}" and opened:
            boxed, start = opened.pop()
            if boxed >= 0:
                found.append(_Box(boxed, token.end(), text[start : token.start()]))
    return found


def stated_answer(text: str) -> str:
    """The formulas after the last "answer", else the last formula, else the text after the last "answer", else the
    whole text."""
    text = _EMPHASIS.sub(r"\2", text)
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
    if _states(shown, gold):
        return True
    if not plain or _FORMULA.search(shown):
        return False
    return any(isinstance(found, str) and _states(found, gold) for found in extract_expressions(shown))


def _states(found: str, gold: str) -> bool:
    """Whether a response's answer is the gold one. A response must not be able to cause a long evaluation."""
    if is_heavy(found) and not is_heavy(gold):
        return False
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
        or not (len(set(filter(str.isalpha, _WORDS.sub("", first)))) > 1 or _APPLIED.search(first))
    ):
        return None
    agree = all(same_answer(one, other) for one, other in zip(sides, sides[1:], strict=False))
    return sides[-1] if agree else None


BUILT_IN: dict[str, Callable[..., Any]] = {"math": math, "exact": exact, "math_verify": math_verify}
"""Rewards that can be named without a module."""
