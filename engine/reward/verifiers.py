"""The built-in verifiers. They read `prompt.answer` and `response.text` only and give 1 or 0."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from engine.types import Prompt, Response, Score

_TAIL = 2_000
"""Characters of an unboxed response that are searched: math-verify's patterns take quadratic time (24 s for 64,000)."""
_DETAIL = 200
"""Characters of the extracted answer that a score keeps."""
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def per_response(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a reward that is called as `(prompt, response) -> float | Score`, once for each response as it lands."""
    function.per_response = True  # type: ignore[attr-defined]
    return function


@per_response
def exact(prompt: Prompt, response: Response) -> Score:
    """1 if the text after the last "#", else the last line with anything in it, is the answer; blanks around aside."""
    marked = response.text.rpartition("#")
    found = marked[2].strip() if marked[1] else (response.text.strip().splitlines() or [""])[-1].strip()
    return Score(float(found == prompt.answer.strip()), detail=found[:_DETAIL])


@per_response
def math(prompt: Prompt, response: Response) -> Score:
    r"""1 if the last `\boxed{…}` of the response, else its final expression, equals the answer (math-verify)."""
    found = last_boxed(response.text)
    shown = found if found is not None else response.text[-_TAIL:]
    same = found is not None and _bare(found) == _bare(prompt.answer)
    return Score(float(same or _equal(prompt.answer, found, shown)), detail=shown[-_DETAIL:].strip())


def last_boxed(text: str) -> str | None:
    r"""What stands in the `\boxed{…}` that closes last, braces balanced; None without one. Linear in the text."""
    opened: list[tuple[bool, int]] = []  # for each open brace: whether \boxed opened it, where its content starts
    found: str | None = None
    for token in _BRACES.finditer(text):
        if token[0] == "{" or token[0].startswith("\\boxed"):
            opened.append((token[0] != "{", token.end()))
        elif token[0] == "}" and opened:
            boxed, start = opened.pop()
            found = text[start : token.start()] if boxed else found
    return found


def _equal(answer: str, boxed: str | None, tail: str) -> bool:
    from math_verify import verify  # here, not above: SymPy takes half a second that `exact` need not wait for

    found = _parse_latex(boxed) if boxed is not None else _parse(tail)
    return bool(verify(_gold(answer), found, timeout_seconds=None))


@lru_cache(maxsize=256)
def _gold(answer: str) -> list[Any]:
    boxed = last_boxed(answer)
    return _parse_latex(answer if boxed is None else boxed)


def _parse_latex(latex: str) -> list[Any]:
    bare = _bare(latex)
    # A "$" that is left inside separates text from formulas: then the whole is a sentence, not a formula.
    return _parse(bare if "$" in bare.replace("\\$", "") else f"${bare}$")


def _parse(text: str) -> list[Any]:
    """math-verify's candidates for the expression meant: SymPy objects and the text itself; empty if there is none.

    Without its own time limit, which needs SIGALRM and so the user's main thread: the worker's limit ends a call.
    """
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the limit we switch off
    return list(parse(text, parsing_timeout=None))


def _bare(latex: str) -> str:
    """Without blanks and formula delimiters around."""
    bare = latex.strip()
    for left, right in _DELIMITERS:
        if bare.startswith(left) and bare.endswith(right) and len(bare) > len(left) + len(right):
            inner = bare[len(left) : -len(right)]
            return bare if left in inner.replace("\\$", "") else inner.strip()
    return bare
