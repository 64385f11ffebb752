"""Compares two formulas with math-verify (SymPy), unless that would take minutes or gigabytes."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

LONGEST = 1_000
"""Largest number of characters of a formula that is given to SymPy."""

_TOWER = re.compile(
    r"\^\{?[^{}^]{0,20}\^|\^\{?\(?-?\d{5}|[+-][^()]*\)\^\{?\d{3}|\d{4,}\)?!|!!|\d{5,}.{0,3}\\choose|\\binom\{?\d{5}"
)
"""Expressions that take SymPy minutes: powers of powers, high powers of sums, large factorials and binomials."""
_HEAVY = re.compile(r"\\(?:sum|prod|int|lim|oint|iint)(?![a-z])")


def equal(gold: str, found: str) -> bool:
    """Whether two formulas are equal. If `found` would take minutes or gigabytes to evaluate, the result is False
    without evaluation."""
    if (
        len(found) > LONGEST
        or nesting(found) > 30
        or _TOWER.search(found)
        or (_HEAVY.search(found) and not _HEAVY.search(gold))
    ):
        return False
    from math_verify import verify  # imported here: SymPy takes half a second, which `exact` does not need

    return bool(verify(_expression(gold), _parsed(found), timeout_seconds=None))


def verified(answer: str, response: str) -> bool:
    r"""math-verify's verdict on a whole response: what it extracts from it against what it extracts from
    `\boxed{answer}`. Without the limits of `equal`; the worker's limit of time and memory ends a call."""
    from math_verify import verify

    return bool(verify(extract(f"\\boxed{{{answer}}}"), extract(response), timeout_seconds=None))


def nesting(text: str) -> int:
    """The depth of nested brackets."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


@lru_cache(maxsize=256)
def _expression(gold: str) -> list[Any]:
    return _parsed(gold)


def _parsed(latex: str) -> list[Any]:
    # A remaining "$" separates text from formulas: then the whole is a sentence, not a formula.
    return extract(latex if "$" in latex else f"${latex}$")


def extract(text: str) -> list[Any]:
    """math-verify's candidates for the expression in a text: SymPy objects and the text itself; empty if there is none.

    math-verify's own time limit is switched off, because it uses SIGALRM, which works in the main thread only. The
    worker's limit ends a call.
    """
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about the limit that is switched off
    return list(parse(text, parsing_timeout=None))
