"""Decides whether two answers in LaTeX are equal.

`_read` makes an `Answer` of each: its kind and parts. Answers of one kind are compared part by part, in order where it
matters, and answers of two kinds are equal only as `_same` says. Sets of real numbers are SymPy's; single formulas are
compared in `formulas`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

from engine.reward.math.answers import tidy_answer
from engine.reward.math.canonical import AND, canonical_latex, is_closed, split_parts
from engine.reward.math.formulas import LONGEST, Candidate, constant, same_equation, same_formula, values_near
from engine.reward.math.quantities import read_quantity
from engine.reward.math.sets import MOST, NAME, bracketed, real_set, relation

_NAMED = re.compile(r"\(([^()=]+)\)=(\(.+\))")
_OR = re.compile(r",?\s*\\text\{,? ?or\}\s*")
_CHOICE = re.compile(r"(?:\\text\{)?(?:\(([A-Z])\)|([A-Z])[).:]?)\}?")
_LABELLED = re.compile(
    r"(?:\\text\{)?(?:\(([A-Z])\)|([A-Z])[).])(?:\}|\\text\{(?=\d)|(?=\d|\\(?:frac|sqrt|pi)))(.+?)\}?"
)
_MATRIX = re.compile(r"\\begin\{([pb]?matrix)\}(.*)\\end\{\1\}", re.DOTALL)
_BASE = re.compile(r"(-?[0-9A-Z]+)_(\d|\{\d\d\})")
_WORDS = re.compile(r"\(?(?:\\text\{[^{}\\]*\}|[A-Z]{2,}|[A-Z][a-z]+|[a-z]{3,})\)?")
_TEXTS = re.compile(r"\\text\{([^{}]*)\}")
_BLANKS = re.compile(r"(?<![\d ]) ++| ++(?!\d)")  # what may be left out: no blank between two digits
_SETS = re.compile(r"\\(?:cup|cap|setminus|mid|in|mathbb|emptyset)(?![a-z])|[<>\[\]]|\\(?:\{|[lgn]e)|real ?numbers")


@dataclass
class Answer:
    """An answer, read. Kinds: assigned, choice, equation, formula, list, matrix, number, relation, set, tuple, words,
    and text, which is equal to its own text only."""

    kind: str
    text: str
    """Without name and unit."""
    parts: Sequence[Answer] = ()
    mark: str = ""
    """Brackets of a tuple, shape of a matrix, signs of a relation, the word in a list, letters of a choice or words."""
    name: str = ""
    """What has this value: x in x = 5."""
    unit: str = ""
    value: Fraction | None = None
    reals: Candidate = None
    """SymPy's set, if it is one of real numbers; of a tuple of two, the open interval that it may be."""


def same_answer(one: str, other: str) -> bool:
    """Whether two answers are equal. Names, units, bases and the brackets of a tuple or set may be left out in either
    of them."""
    if max(len(one), len(other)) > 2 * LONGEST:  # no answer is this long, and the patterns take quadratic time
        return one == other
    first, second = (canonical_latex(tidy_answer(text)) for text in (one, other))
    if _BLANKS.sub("", _TEXTS.sub(r" \1 ", first)) == _BLANKS.sub("", _TEXTS.sub(r" \1 ", second)):
        return bool(first)
    return bool(first and second) and _same(_read(first), _read(second))


def _read(text: str, depth: int = 4) -> Answer:
    found = (depth and (_structure(text, depth) or _equation(text, depth) or _single(text, depth))) or Answer(
        "text", text
    )
    if found.reals is None and (_SETS.search(text) or (found.kind == "tuple" and len(found.parts) == 2)):
        names: set[str] = set()
        found.reals = real_set(text, names)
        found.name = found.name or "".join(names)
        found.reals = None if len(names) > 1 else found.reals
    return found


def _structure(text: str, depth: int) -> Answer | None:
    """What has entries."""

    def read(parts: Sequence[str]) -> list[Answer]:
        return [_read(part.strip(), depth - 1) for part in parts]

    if named := _NAMED.fullmatch(text):
        (value,) = read([named[2]])  # (x, y) = (1, 2), or a list of tuples
        tuples = value.parts if value.kind == "list" else [value]
        cases = [_assigned(f"{named[1]}={each.text}", split_parts(named[1], ","), each.parts) for each in tuples]
        return cases[0] if len(cases) == 1 else replace(value, text=text, parts=cases)
    brackets, entries = bracketed(text) or ("", [])
    if brackets and not (brackets == "\\{\\}" and re.search(r"\\mid|[|:]", text)):
        found = read(_spread(entries))
        is_value = len(found) == 1 and found[0].reals is None  # {5} is typed for 5
        return found[0] if is_value else Answer("set" if brackets == "\\{\\}" else "tuple", text, found, brackets)
    if text[:1] + text[-1:] == "()" and is_closed(text[1:-1]) and "=" in text:
        return read([text[1:-1]])[0]
    if matrix := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in matrix[2].split("\\\\") if row.strip()]
        return Answer("matrix", text, read(sum(rows, [])), str([*map(len, rows)]))
    cases = read(_OR.split(text)) if _OR.search(text) else []
    if cases and all(each.kind == "assigned" for each in cases):
        return Answer("list", text, cases, "or")
    parts = split_parts(AND.sub(",", text), ",")
    parts = _spread(parts) if "=" not in text else parts
    return _list(text, read(parts)) if len(parts) > 1 else None


def _list(text: str, entries: list[Answer]) -> Answer:
    """A list, unless its entries are values of different names. One name twice makes a list of its values."""
    joined = "".join(sorted({*AND.findall(text)}))
    names = [each.name for each in entries if each.name and each.reals is None]
    if "\\dots" in text or not (names == [entries[0].name] or len(names) in (0, len(entries))):
        return Answer("text", text)
    if len({*names}) <= 1:
        bare = [replace(each, name="") if each.reals is None else each for each in entries]
        return Answer("list", text, bare, joined, names[0] if names else "")
    return _assigned(text, names, entries) if joined in ("", "and") else Answer("text", text)


def _assigned(text: str, names: list[str], values: Sequence[Answer]) -> Answer:
    """Values of different names, sorted by these."""
    if not len(values) == len(names) == len({*names}):
        return Answer("text", text)
    entries = [replace(each, name=name) for name, each in zip(names, values, strict=True)]
    return Answer("assigned", text, sorted(entries, key=lambda each: each.name))


def _equation(text: str, depth: int) -> Answer | None:
    """x = 5, 2 + 3 = 5 and 14/3 \\approx 4.67 state a value; x + y = 2 is an equation; 3 = 5 = x is text."""
    sides = split_parts(text, "=", "\\approx", "\\in")
    if len(sides) == 1:
        return None
    names = [side for side in sides if NAME.fullmatch(side)]
    values = [_read(side, depth - 1) for side in sides[:MOST] if side not in names]
    is_stated = all(_agree(*pair, "\\approx" in text) for pair in pairwise(values)) and len(sides) <= MOST
    if len(split_parts(text, "\\in")) > 1:  # x \in 7 states nothing
        is_stated = len(sides) == 2 and sides[0] in names and values[0].reals is not None if values else False
    if values and is_stated and values[0].kind != "relation":
        return replace(values[0], name=values[0].name or "".join(names[:1]))
    parts = [Answer("formula", side) for side in sides]
    return Answer("equation" if len(split_parts(text, "=")) == len(sides) == 2 else "text", text, parts)


def _agree(one: Answer, other: Answer, nearly: bool) -> bool:
    """Whether two sides are equal, or with `nearly` the second one is the first one, rounded."""
    exact, rounded = (constant(each.text) if each.value is None else each.value for each in (one, other))
    if not nearly or exact is None or rounded is None:
        return _same(one, other)
    return abs(exact - rounded) * 2 * 10 ** len(other.text.partition(".")[2]) <= 1


def _single(text: str, depth: int) -> Answer:
    if choice := _CHOICE.fullmatch(text):
        return Answer("choice", text, mark=(choice[1] or choice[2]).lower())
    if (choice := _LABELLED.fullmatch(text)) and (value := _read(choice[3], depth - 1)).kind in ("number", "formula"):
        return Answer("choice", text, [value], (choice[1] or choice[2]).lower())
    if len(parts := relation(text)) > 1 and all(map(is_closed, parts)):
        return Answer("relation", text, [_read(part, depth - 1) for part in parts[::2]], "".join(parts[1::2]))
    if (base := _BASE.fullmatch(text)) and int(base[2].strip("{}")) > max(
        int(digit, 36) for digit in base[1].strip("-")
    ):
        return Answer("text", base[1], unit=f"base {base[2]}")
    if _WORDS.fullmatch(text):
        words = re.sub(r"[\s(){}.,;:](?!(?<=\d.)\d)", " ", _TEXTS.sub(r"\1", text))
        return Answer("words", text, mark=_BLANKS.sub("", words).casefold())
    if not (found := read_quantity(text)):
        return Answer("text", text)
    kind = "number" if found.value is not None else "text" if "\\text" in found.text else "formula"
    return Answer(kind, found.text, unit=found.unit, value=found.value)


def _spread(parts: Sequence[str]) -> list[str]:
    r"""The parts, with a \pm b replaced by a + b and a - b."""
    pairs = [[part.replace("\\pm", sign) for sign in "+-"] if part.count("\\pm") == 1 else [part] for part in parts]
    return [entry.lstrip("+ ") for pair in pairs for entry in pair]


def _same(one: Answer, other: Answer) -> bool:
    first, second = sorted((one, other), key=lambda each: each.kind)
    differ = bool(first.name and second.name and first.name != second.name)
    if "equation" in (first.kind, second.kind) or (differ and {first.kind, second.kind} <= {"number", "formula"}):
        sides = [[part.text for part in each.parts] or [each.name, each.text] for each in (first, second)]
        return all(map(all, sides)) and bool(same_equation(*sides))
    if differ or (first.unit and second.unit and first.unit != second.unit):
        return False
    if first.text == second.text:
        return True
    if first.reals is not None and second.reals is not None and {first.kind, second.kind} not in ({"tuple"}, {"set"}):
        return bool(first.reals == second.reals)
    both = (first.parts, second.parts)
    match first.kind, second.kind:
        case "number", "number" if first.value is not None and second.value is not None:
            part, whole = (first.value, second.value) if first.unit == "%" else (second.value, first.value)
            hundredth = part / 100 if (first.unit == "%") != (second.unit == "%") else part
            return any(values_near(value, whole, "." in first.text + second.text) for value in (part, hundredth))
        case "formula", "formula" | "number" | "matrix":
            return bool(same_formula(first.text, second.text))
        case "choice" | "words", "choice" | "words":
            return first.mark == second.mark and (not all(both) or _in_order(*both))
        case "choice", _:
            return _in_order(first.parts, [second])
        case "list", "list":
            is_other = first.mark and second.mark and first.mark != second.mark
            return not is_other and (first.reals is None) == (second.reals is None) and _matched(*both)
        case ("set", "set") | ("list", "set"):
            return bool(first.reals == second.reals is not None) or _matched(*both)
        case ("assigned", "list" | "tuple") | ("list", "tuple"):
            is_plain = first.mark != "or" and second.mark in ("", "()") and not second.name
            return is_plain and _in_order([replace(each, name="") for each in first.parts], second.parts)
        case "relation", "relation":  # the square of a root isn't what it is a root of where that is negative
            return first.mark == second.mark and "sqrt" not in first.text + second.text and _in_order(*both)
        case ("assigned", "assigned") | ("tuple", "tuple") | ("matrix", "matrix"):
            return first.mark == second.mark and _in_order(*both)
    return False


def _in_order(ours: Sequence[Answer], theirs: Sequence[Answer]) -> bool:
    return len(ours) == len(theirs) and all(_same(a, b) for a, b in zip(ours, theirs, strict=True))


def _matched(ours: Sequence[Answer], theirs: Sequence[Answer]) -> bool:
    """Whether each entry has a partner that equals it, independent of their order; a long list must be in order."""
    if len(ours) != len(theirs) or len(ours) > MOST:
        return _in_order(ours, theirs)
    left = [*theirs]
    for entry in ours:
        place = next((place for place, each in enumerate(left) if _same(entry, each)), None)
        if place is None:
            return False
        del left[place]
    return True
