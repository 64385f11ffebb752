r"""Reads sets of real numbers as SymPy's: x \ne 2, \mathbb{R}\setminus\{2\} and (-\infty,2)\cup(2,\infty) are one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from engine.reward.math.canonical import AND, GREEK, is_closed, split_parts
from engine.reward.math.formulas import Candidate, constant
from engine.reward.math.quantities import read_number

NAME = re.compile(
    rf"(?!(?:e|i|\\pi ?)$|.*(?:not|mod|max|min|least|most|more|less|about|false|wrong|illion|\{{(?:and|or)\}}))"
    rf"(?:[a-zA-Z]|(?<=[a-zA-Z)])'|\\text\{{[^{{}}]*\}}|_(?:\\?\w|\{{[^{{}}]*\}})"
    rf"|\|[A-Z]+\||\\(?:{GREEK}|angle|triangle|overline|vec|bar|hat)(?![a-zA-Z]) ?"
    r"|\^\{-1\}(?=\()|(?<=[a-zA-Z}'])\([^()=]*\)|\{[a-zA-Z]+\}|\\frac\{d[a-z]?\}\{d[a-z]\})++"
)
"""Names to which a value can be given: x, x_1, f(x), f(2), AB, |AB|, \\angle ABC, \\text{Area}. No arithmetic, no
constant."""
MOST = 12
"""Largest number of entries of a list that may be in any order, of parts of a union, and of sides of an equation."""
_RELATION = re.compile(r"(\\(?:le|ge|ne)(?![a-z])|<|>)")
_TURNED = {"\\le": "\\ge", "\\ge": "\\le", "<": ">", ">": "<"}
_DOMAIN = re.compile(r"(?:\\mathbb\{R\}|\\text\{R\}|\\text\{all real numbers\}|allrealnumbers)(?:\^\{?([+-])\}?)?")
_BUILDER = re.compile(r"\\\{([a-zA-Z])(?:\\in ?\\mathbb\{R\})?(?:\\mid(?![a-z]) ?|\||:)(.+)\\\}", re.DOTALL)
_RELATED = re.compile(r"[<>=]|\\(?:[lgn]e|in)(?![a-z])")
_POINTS = re.compile(r"([a-zA-Z])(?:=|(\\ne)) ?([^<>=]+)|\\\{([^<>=]+)\\\}")


def bracketed(text: str) -> tuple[str, list[str]] | None:
    r"""The brackets and the entries of (a, b), [a, b), or \{a\}; None for anything else, such as (a + 1)(b, c)."""
    left, right = ("\\{", "\\}") if text.startswith("\\{") else (text[:1], text[-1:])
    inner = text[len(left) : -len(right)]
    parts = split_parts(inner, ",")
    if left + right not in ("()", "[]", "(]", "[)", "\\{\\}") or not (
        text.endswith(right) and inner and is_closed(inner)
    ):
        return None
    return (left + right, parts) if len(parts) > 1 or left == "\\{" else None


def relation(text: str) -> list[str]:
    """Sides and signs of a chain of relations, from the smaller side on if the signs agree; one side if none."""
    parts = [part.strip() for part in _RELATION.split(text)]
    return [_TURNED.get(part, part) for part in reversed(parts)] if {*parts[1::2]} & {"\\ge", ">"} else parts


def real_set(text: str, names: set[str]) -> Candidate | None:
    """SymPy's set of real numbers that a text states; None if it states none. Names of its variable go to `names`. Ends
    that are no fractions are rounded to three hundred digits."""
    from sympy import Complement, FiniteSet, Intersection, Interval, Reals, S, Union, oo

    for kind, sign in ((Union, "\\cup"), (Intersection, "\\cap"), (Complement, "\\setminus")):
        if len(parts := split_parts(text, sign)) > 1:
            is_one = len(split_parts(text, "\\cup", "\\cap", "\\setminus")) == len(parts)  # no order of operations
            return _combined(kind, parts, names) if is_one else None
    if len(parts := split_parts(AND.sub(",", text), ",")) > 1 and all(map(_RELATED.search, parts)):
        words = {*AND.findall(text)} - {""}
        found = _combined(Union if "or" in words else Intersection, parts, names) if len(words) < 2 else None
        return None if found is None or found.is_empty else found  # "and" is typed for "or"
    if domain := _DOMAIN.fullmatch(text):
        return {"+": Interval.open(0, oo), "-": Interval.open(-oo, 0)}.get(domain[1], Reals)
    if (builder := _BUILDER.fullmatch(text)) and is_closed(builder[2]):
        found = real_set(builder[2], names)
        return found if builder[1] in names else None
    if points := _POINTS.fullmatch(text):
        names.update(filter(None, [points[1]]))
        values = [*map(_end, split_parts(points[3] or points[4], ","))]
        found = None if None in values or len(values) > MOST else FiniteSet(*values)
        return Complement(Reals, found) if points[2] and found is not None else found
    brackets, ends = bracketed(text) or ("", [])
    if len(ends) != 2:
        parts = relation(text)
        if len(parts) == 3:
            parts = [*parts, "<", "\\infty"] if NAME.fullmatch(parts[2]) else ["-\\infty", "<", *parts]
        if (
            len(parts) != 5
            or not NAME.fullmatch(parts[2])
            or "|" in parts[2]
            or not {parts[1], parts[3]} <= {"<", "\\le"}
        ):
            return S.EmptySet if text == "\\emptyset" else None
        names.add(parts[2])
        brackets, ends = ("(" if parts[1] == "<" else "[") + (")" if parts[3] == "<" else "]"), parts[::4]
    low, high = map(_end, ends)
    is_known = low is not None and high is not None and low <= high
    return Interval(low, high, brackets[0] == "(", brackets[1] == ")") if is_known else None


def _combined(kind: Candidate, parts: Sequence[str], names: set[str]) -> Candidate | None:
    sets = [real_set(part, names) for part in parts[:MOST]]
    return None if any(each is None for each in sets) or len(parts) > MOST else kind(*sets)


def _end(text: str) -> Candidate | None:
    """SymPy's number for the end of an interval; None if it isn't real."""
    from sympy import Rational, oo

    if match := re.fullmatch(r"([+-]?)\\infty ?", text):
        return -oo if match[1] == "-" else oo
    value = read_number(text)
    value = constant(text) if value is None else value
    return None if value is None else Rational(value.numerator, value.denominator)
