r"""Decides whether two answers in LaTeX are equal: structure is compared here, formulas by math-verify.

Numbers, words, numerals with a base, tuples, intervals, lists, sets, unions and matrices are split and compared
exactly, in order if order matters. Only single formulas go to SymPy, because SymPy would read tuples as intervals, read
words as products of letters (so anagrams would be equal), and drop the base of a numeral.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from engine.reward.answers import strip_delimiters, tidy
from engine.reward.formulas import LONGEST, equal
from engine.reward.quantities import number, scaled

TOLERANCE = Fraction(1, 2_000_000)
"""Absolute tolerance of a decimal: six places, as in math-verify. Fractions and whole numbers are compared exactly."""
RELATIVE = Fraction(1, 10_000)
"""Tolerance of a decimal relative to the gold value, for small values: 0.0000003 has no digit in six places."""
MOST = 12
"""Largest number of entries of a list that may be in any order; a longer list must be in order."""

_SIZES = r"left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|quad|qquad"
_SOFT = re.compile(rf"\\(?:{_SIZES})(?![a-zA-Z])\s*|(?<!\\)\\[!,;: ]|~")
_TEXT = re.compile(r"\\(?:mbox|textnormal|textrm|textbf|textit|mathrm|mathbf|operatorname)(?=\s*\{)")
_REPLACED = {
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\cfrac": "\\frac",
    "\\leq": "\\le",
    "\\geq": "\\ge",
    "\\ldots": "\\dots",
    "\\times": "\\cdot",
    "\\degree": "^\\circ",
    "\\degrees": "^\\circ",
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
    "\\%": "%",
    "^{\\circ}": "^\\circ",
    "{,}": ",",
    "°": "^\\circ",
    "−": "-",
    "–": "-",
    "×": "\\cdot",
    "π": "\\pi ",
    "∞": "\\infty ",
    "∪": "\\cup ",
}
_KEYS = (re.escape(key) + ("(?![a-zA-Z])" if key[-1].isascii() and key[-1].isalpha() else "") for key in _REPLACED)
_REPLACE = re.compile("|".join(_KEYS))
_GROUPED = re.compile(r"(?<=\d)(?:,?\s*\\[!,]\s*|\{,\})(?=\d{3}(?!\d))")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_ARITHMETIC = re.compile(r"(?!.*(?:\d\(|\)[\d(]|\d\\frac))(?:[\d.+\-*/^(){}]|\\(?:cdot|frac|sqrt) ?)+")
_TEXT_UNIT = re.compile(r"\\text\{([^{}]*)\}(?:\^\{?[23]\}?)?$")
_NAMES = """mm millimeter millimetre, cm centimeter centimetre, m meter metre, km kilometer kilometre, in inch inche,
ft foot feet, yd yard, mi mile, mg milligram, g gram, kg kilogram, lb pound, oz ounce, s sec second, min minute,
h hr hour, day, week, month, year, cent, dollar, euro, mph, am, pm, gallon, liter litre"""
_KNOWN = {name: names.split()[0] for names in _NAMES.split(",") for name in names.split()}
_NAMED = re.compile(r"[a-zA-Z](?:_\{?\w\}?)?(?:\([a-z]\))?(?:=|\\in(?![a-z]))(?=.)")
_BASE = re.compile(r"(-?[0-9A-Z]+)_(?:\{(?:\\text\{)?(\w+)\}?\}|(\d))")
_BASES = {
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
    "twelve": "12",
    "sixteen": "16",
}
_WORDS = re.compile(r"\(?(?:\\text\{[^{}\\]*\}|[A-Z]{3,}|[A-Z]?[a-z]{3,})\)?[.,]?")
_RELATION = re.compile(r"(\\le|\\ge|\\lt|\\gt|<|>)(?![a-z])")
_TURNED = {"\\le": "\\ge", "\\ge": "\\le", "<": ">", ">": "<", "\\lt": "\\gt", "\\gt": "\\lt"}
_MATRIX = re.compile(r"\\begin\{([pb]?matrix)\}(.*)\\end\{\1\}", re.DOTALL)
_AND = re.compile(r",?\s*(?:\\text\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*|;")


def same(gold: str, found: str) -> bool:
    """Whether `found` states the answer `gold`. Not symmetric: `found` may leave out names, units and brackets of
    `gold`."""
    first = canonical(tidy(gold))
    second = canonical(found)
    return bool(second) and _same(first, second, 4)


@lru_cache(maxsize=1024)
def canonical(latex: str) -> str:
    r"""One spelling of the same LaTeX: no layout, no blanks, \frac{a}{b}, \sqrt{a}, x^2, no full stop at the end."""
    text = _TEXT.sub(r"\\text", strip_delimiters(latex.strip().rstrip(".,;").strip()))
    text = _SOFT.sub(" ", _GROUPED.sub("", text))
    text = _REPLACE.sub(lambda match: _REPLACED[match[0]], text)
    if not re.search(r"[(\[]", text):  # in brackets a comma separates entries
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    text = re.sub(r"\\text\s*\{([^{}]*)\}", lambda match: f"\\text{{{'~'.join(match[1].split())}}}", text)
    text = re.sub(r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])", r"\1~", text)  # \pi r is not \pir
    text = re.sub(r"\s+", "", text).replace("~", " ")
    text = re.sub(r"\\frac ?(\d|[a-zA-Z]|\\pi(?![a-z]))(?=.)", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\{[^{}]*\}) ?(\d|[a-zA-Z]|\\pi(?![a-z]))", r"\1{\2}", text)
    text = re.sub(r"\\sqrt ?(\d|[a-zA-Z])", r"\\sqrt{\1}", text)
    text = re.sub(r"([\^_])\{(\w|\\circ)\}", r"\1\2", text)
    return text.rstrip(".,;")


def _same(gold: str, found: str, depth: int) -> bool:
    """Whether two canonical texts are equal. The first comparison that applies to `gold` decides."""
    if gold == found:
        return True
    if not depth:
        return False
    for compare in (
        _units,
        _numbers,
        _numerals,
        _matrices,
        _words,
        _relations,
        _chains,
        _named,
        _unions,
        _brackets,
        _lists,
    ):
        verdict = compare(gold, found, depth)
        if verdict is not None:
            return verdict
    return equal(gold, found)


def _units(gold: str, found: str, depth: int) -> bool | None:
    """False if both have a known unit and these differ; None otherwise. A unit may be left out; unknown units are
    ignored.

    Also False if one formula has a factor such as million that the other lacks: factors are multiplied out for numbers
    only.
    """
    one, other = (_unit(text) for text in (gold, found))
    if one and other and one != other:
        return False
    (_, scale) = scaled(gold)
    (_, other_scale) = scaled(found)
    return False if scale != other_scale and None in (number(gold), number(found)) else None


def _unit(text: str) -> str:
    match = _TEXT_UNIT.search(text)
    words = re.sub(r"^(?:square|sq|cubic|cu)[. ]+|[.\s]", "", match[1].casefold()) if match else ""
    return _KNOWN.get(words, _KNOWN.get(words.removesuffix("s"), ""))


def _numbers(gold: str, found: str, depth: int) -> bool | None:
    """Compare numbers, with or without units."""
    one = number(gold)
    other = number(found)
    if one is None or other is None:
        return None
    (value, percent) = one
    (given, other_percent) = other
    near = min(TOLERANCE, abs(value) * RELATIVE) if "." in gold or "." in found else 0
    if abs(value - given) <= near:
        return True
    if percent == other_percent:
        return False
    return abs(value / 100 - given) <= near if percent else abs(value - given / 100) <= near


def _numerals(gold: str, found: str, depth: int) -> bool | None:
    """Compare numerals with a base: by their digits, and by the base if both have one."""
    one = _BASE.fullmatch(gold)
    if one is None:
        return None
    other = _BASE.fullmatch(found)
    if other is None:
        return one[1].lstrip("0") == found.lstrip("0")
    bases = [_BASES.get((match[2] or match[3]).lower(), match[2] or match[3]) for match in (one, other)]
    return one[1].lstrip("0") == other[1].lstrip("0") and bases[0] == bases[1]


def _matrices(gold: str, found: str, depth: int) -> bool | None:
    one = _MATRIX.fullmatch(gold)
    other = _MATRIX.fullmatch(found)
    if one is None:
        return None
    if other is None:
        return False
    rows = [[row.split("&") for row in re.split(r"\\\\", match[2].strip()) if row.strip()] for match in (one, other)]
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    return all(
        _same(a, b, depth - 1) for ours, theirs in zip(*rows, strict=True) for a, b in zip(ours, theirs, strict=True)
    )


def _words(gold: str, found: str, depth: int) -> bool | None:
    """Compare texts that are not formulas: words, letters of a choice, names of points in order."""
    if not _WORDS.fullmatch(gold):
        return None
    return _letters(gold) == _letters(found)


def _letters(text: str) -> str:
    words = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    return re.sub(r"[\s(),.;:{}]+", "", words).casefold()


def _relations(gold: str, found: str, depth: int) -> bool | None:
    """Compare chains of relations: 1 < x <= 3 equals 3 >= x > 1. A single relation is left to SymPy."""
    ours, theirs = (_RELATION.split(text) for text in (gold, found))
    if len(ours) == 1:
        return None
    turned = [_TURNED.get(part, part) for part in reversed(theirs)]
    for parts in (theirs, turned):
        if ours[1::2] == parts[1::2] and _in_order(ours[::2], parts[::2], depth):
            return True
    return None if len(ours) == 3 else False


def _chains(gold: str, found: str, depth: int) -> bool | None:
    r"""Compare equations. If gold is a chain of numbers (0.56 = 56\%), each side of `found` must equal one of them. If
    not, no side but the last may have another value than gold (3 = 5 is not 5)."""
    ours, theirs = (re.split(r"=|\\approx(?![a-z])", text) for text in (gold, found))
    if len(ours) == 1 or not all(number(part) for part in ours):
        value = gold[name.end() :] if (name := _NAMED.match(gold)) else gold
        stated = found.split("=")
        wrong = (
            "=" not in value and len(found) <= LONGEST and any(_other_value(value, part, depth) for part in stated[:-1])
        )
        return False if wrong else None
    return all(any(_same(ours_part, part, depth - 1) for ours_part in ours) for part in theirs)


def _other_value(gold: str, part: str, depth: int) -> bool:
    """Whether a side of an equation is a number, or arithmetic with digits, of another value than gold.

    A decimal may be a rounded value: 14/3 = 4.67 states 4.67.
    """
    exact = number(gold)
    given = number(part)
    if exact is not None and "." in gold:
        unit = Fraction(1, 10 ** len(re.sub(r".*\.|\D", "", gold)))
        return given is not None and abs(exact[0] - given[0]) > unit / 2 and not _same(gold, part, depth - 1)
    known = given is not None or (any(map(str.isdigit, part)) and _ARITHMETIC.fullmatch(part) is not None)
    return known and not _same(gold, part, depth - 1)


def _named(gold: str, found: str, depth: int) -> bool | None:
    r"""Compare answers with a name: x = 5 and x \in [0, 1] equal 5 and [0, 1]. If both have a name, it must be the
    same."""
    one = _NAMED.match(gold)
    other = _NAMED.match(found)
    ours = gold[one.end() if one else 0 :]
    theirs = found[other.end() if other else 0 :]
    if not (one or other) or "=" in ours + theirs or (one and other and one[0] != other[0]):
        return None
    return _same(ours, theirs, depth - 1)


def _unions(gold: str, found: str, depth: int) -> bool | None:
    parts = [split(text, "\\cup") for text in (gold, found)]
    if len(parts[0]) == 1:
        return None
    return _matched(parts[0], parts[1], depth)


def _brackets(gold: str, found: str, depth: int) -> bool | None:
    """Compare (a, b), [a, b), {a, b} by their brackets and entries; the order matters except in sets."""
    one = bracketed(gold)
    other = bracketed(found)
    if one is None:
        return None
    if other is None:
        loose = split(found, ",")
        return _in_order(one[1], loose, depth) if gold[0] == "(" and len(loose) == len(one[1]) else False
    if one[0] != other[0]:
        return False
    return (
        _matched(_spread(one[1]), _spread(other[1]), depth)
        if one[0] == "\\{\\}"
        else _in_order(one[1], other[1], depth)
    )


def bracketed(text: str) -> tuple[str, list[str]] | None:
    """Kind and entries of a text in brackets with a comma, or of a set; None for anything else, such as (a + 1)(b,
    c)."""
    for left, right in (("(", ")"), ("[", "]"), ("(", "]"), ("[", ")"), ("\\{", "\\}")):
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            inner = text[len(left) : -len(right)]
            parts = split(inner, ",")
            if _closed(inner) and (len(parts) > 1 or left == "\\{"):
                return left + right, parts
    return None


def _lists(gold: str, found: str, depth: int) -> bool | None:
    r"""Compare lists such as 1, 2 and 3 in any order. \pm stands for two entries; braces around are optional."""
    ours = _entries(gold)
    theirs = _entries(found)
    if len(ours) == 1 and len(theirs) == 1:
        return None
    return _matched(ours, theirs, depth)


def _entries(text: str) -> list[str]:
    sets = bracketed(text)
    parts = sets[1] if sets and sets[0] == "\\{\\}" else split(_AND.sub(",", text), ",")
    if len(parts) > 1 and (name := _NAMED.match(parts[0])) and not any(_NAMED.match(part) for part in parts[1:]):
        parts = [parts[0][name.end() :], *parts[1:]]
    return _spread(parts)


def _spread(parts: Sequence[str]) -> list[str]:
    r"""The parts, with a \pm b replaced by a + b and a - b."""
    pairs = [[part.replace("\\pm", sign) for sign in "+-"] if part.count("\\pm") == 1 else [part] for part in parts]
    return [entry.lstrip("+") for pair in pairs for entry in pair]


def _in_order(ours: Sequence[str], theirs: Sequence[str], depth: int) -> bool:
    return len(ours) == len(theirs) and all(_same(a, b, depth - 1) for a, b in zip(ours, theirs, strict=True))


def _matched(ours: Sequence[str], theirs: Sequence[str], depth: int) -> bool:
    """Whether each of ours equals exactly one of theirs."""
    if len(ours) != len(theirs) or len(ours) > MOST:
        return len(ours) == len(theirs) and _in_order(ours, theirs, depth)
    left = list(theirs)
    for entry in ours:
        place = next((number for number, other in enumerate(left) if _same(entry, other, depth - 1)), None)
        if place is None:
            return False
        del left[place]
    return True


def split(text: str, separator: str) -> list[str]:
    """The parts between separators that are outside brackets."""
    parts = []
    depth = 0
    start = 0
    for token in re.finditer(r"\\cup|\\[{}]|\\.|[()\[\]{},]", text, re.DOTALL):
        if token[0] == separator and depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
        depth += (token[0] in ("(", "[", "{", "\\{")) - (token[0] in (")", "]", "}", "\\}"))
    return [part for part in [*parts, text[start:]] if part]


def _closed(inner: str) -> bool:
    """Whether no bracket inside closes one that was opened outside."""
    depth = 0
    for token in re.finditer(r"\\[{}]|[()\[\]{}]", inner):
        depth += 1 if token[0] in ("(", "[", "{", "\\{") else -1
        if depth < 0:
            return False
    return depth == 0
