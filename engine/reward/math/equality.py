"""Decides whether two answers in LaTeX are equal: structure is compared here, formulas by their values.

Numbers, words, numerals with a base, tuples, intervals, lists, sets, unions, sequences, relations and matrices are
split and compared exactly, in order if order matters. `read_number` reads decimals, fractions and mixed numbers, with
units, per cent signs and words such as million. Only single formulas go to SymPy, because SymPy would read tuples as
intervals, read words as products of letters (so anagrams would be equal), and drop the base of a numeral.

Each comparison splits both answers in the same way, so `same_answer(a, b)` equals `same_answer(b, a)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from engine.reward.math.answers import tidy_answer
from engine.reward.math.canonical import canonical_latex
from engine.reward.math.formulas import LONGEST, Candidate, formulas_equal, lies_within, values_near
from engine.reward.math.quantities import read_number, read_quantity, units_differ
from engine.reward.math.structure import (
    AND,
    HEDGE,
    NAME,
    RELATION,
    TURNED,
    bracketed_entries,
    chain_of,
    is_closed,
    is_list,
    read_interval,
    read_list,
    split_choice,
    split_parts,
)

MOST = 12
"""Largest number of entries of a list that may be in any order; a longer list must be in order."""
_SIDES = 6
"""Largest number of sides of an equation."""

_BUILDER = re.compile(
    r"\\\{([a-zA-Z]|\([a-zA-Z](?:,[a-zA-Z])+\))(\\in(?![a-z])[^|:]*?)?(?:\\mid(?![a-z]) ?|\||:)(.+)\\\}", re.DOTALL
)
_REALS = re.compile(r"\\in ?(?:\\(?:mathbb|mathbf) ?(?:\{R\}|R)|\\R|R|\\text\{R\})")
_LETTER = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]")
_MEMBER = re.compile(r"([a-zA-Z](?:_\{?\w\}?)?(?:\([a-z]\))?)\\in(?![a-z]) ?(?=.)")
_BASE = re.compile(r"(-?[0-9A-Z]+)_(?:\{(?:\\text\{)?(\w+)\}?\}|(\d))")
_DIGITS = re.compile(r"-?[0-9A-Z]*\d[0-9A-Z]*")
_NUMERALS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_BASES = {**{name: str(base) for base, name in enumerate(_NUMERALS, 2)}, "sixteen": "16"}
_WORDS = re.compile(r"\(?(?:\\text\{[^{}\\]*\}|[A-Z]{3,}|[A-Z]?[a-z]{3,})\)?[.,]?")
_MATRIX = re.compile(r"\\begin\{([pb]?matrix)\}(.*)\\end\{\1\}", re.DOTALL)
_TEXTS = re.compile(r"\\text\{([^{}]*)\}")
_TIME = re.compile(r"\d{1,2}(?::\d\d)+")
_DOTS = "\\dots"
_SET = re.compile(r"\\(?:cup|setminus|ne|le|ge|in|mathbb|R)(?![a-z])|[<>\[\]]|\\\{|\\text\{R\}|real ?numbers")
_DOMAIN = re.compile(
    r"(?:\\math(?:bb|bf) ?\{?R\}?|\\R|\\text\{R\}|allrealnumbers|\\text\{(?:all )?real numbers?\})(?:\^\{?([+-])\}?)?"
)
_RELATED = re.compile(r"\\(?:le|ge|ne)(?![a-z])|[<>]")
_VECTOR = re.compile(r"\\langle ?(.+)\\rangle")
_TUPLE = re.compile(r"\(([^()=]+)\)=\(([^()]+|.*\([^()]*\).*)\)")


def same_answer(one: str, other: str) -> bool:
    """Whether two answers are equal. Names, units, bases and the brackets of a tuple or set may be left out in either
    of them."""
    if max(len(one), len(other)) > 2 * LONGEST:  # no answer is this long, and the patterns take quadratic time
        return one == other
    first, second = (canonical_latex(tidy_answer(text)) for text in (one, other))
    return bool(first and second) and _same(first, second, 5)


def _same(one: str, other: str, depth: int) -> bool:
    """Whether two canonical texts are equal. The first comparison that applies to them decides."""
    if one == other or _TEXTS.sub(r"\1", one).replace(" ", "") == _TEXTS.sub(r"\1", other).replace(" ", ""):
        return True
    if not (one and other and depth):
        return False
    for compare in _COMPARISONS:
        verdict = compare(one, other, depth)
        if verdict is not None:
            return verdict
    return formulas_equal(one, other)


def _sequences(one: str, other: str, depth: int) -> bool | None:
    """Compare sequences that continue (1, 2, …, n; 1 : 2 : …; 1 + 2 + … + n) entry by entry."""
    if _DOTS not in one + other:
        return None
    parts = [split_parts(text, ",", ":", "+") for text in (one, other)]
    entries = [[part for part in each if part.strip() != _DOTS] for each in parts]
    dots = [[place for place, part in enumerate(each) if part.strip() == _DOTS] for each in parts]
    separators = [{sign for sign in ",:+" if len(split_parts(text, sign)) > 1} for text in (one, other)]
    if dots[0] != dots[1] or not dots[0] or separators[0] != separators[1]:
        return False
    return _in_order(entries[0], entries[1], depth)


def _builders(one: str, other: str, depth: int) -> bool | None:
    """Compare sets that a condition states, {x | x > 3}, by their variables and conditions. The condition on one number
    may stand alone, or as an interval."""
    ours, theirs = (_BUILDER.fullmatch(text) if is_closed(text[2:-2]) else None for text in (one, other))
    if not (ours or theirs):
        return None
    if ours and theirs:
        kinds = [set(AND.findall(found[3])) for found in (ours, theirs)]
        loose = any(_chain(found[3]) for found in (ours, theirs)) and "or" not in kinds[0] | kinds[1]
        alike = ours[2] == theirs[2] or (_is_plain(ours) and _is_plain(theirs))
        alike = alike and ours[1] == theirs[1] and (loose or kinds[0] == kinds[1])
        return alike and _same(ours[3], theirs[3], depth - 1)
    found, text = (ours, other) if ours else (theirs, one)
    return found is not None and _is_plain(found) and _same(found[3], text, depth - 1)


def _is_plain(builder: re.Match[str]) -> bool:
    """Whether the condition of a set is one on real numbers that states an interval or a value."""
    name, domain, condition = builder.groups()
    return (domain is None or _REALS.fullmatch(domain) is not None) and all(
        ((stated := read_interval(part)).ends and stated.name == name)
        or (part.startswith(f"{name}=") and not _LETTER.search(part, len(name)))
        for part in _alternatives(_chain(condition) or condition)
    )


def _options(one: str, other: str, depth: int) -> bool | None:
    r"""Compare the letter of a choice and the value it stands for: \textbf{(A)}\ 12 equals A and 12, but not (A) 13. A
    text that also names another letter, or retracts the first, is not a choice."""
    (letter, rest) = split_choice(one)
    (other_letter, other_rest) = split_choice(other)
    if not (letter and other_letter):
        left, text = (rest, other) if letter else (other_rest, one)
        return True if left and _same(left, text, depth - 1) else None
    if letter != other_letter or any(HEDGE.search(_TEXTS.sub(r"\1", each)) for each in (rest, other_rest)):
        return False
    return not (rest and other_rest) or _same(rest, other_rest, depth - 1)


def _quantities(one: str, other: str, depth: int) -> bool | None:
    """Compare without units and number words, if there are any. Different units, or different powers of one unit,
    differ."""
    ours = read_quantity(one)
    theirs = read_quantity(other)
    if units_differ(ours.unit, theirs.unit):
        return False
    if None not in (read_number(one), read_number(other)):
        return _numbers(one, other, depth)
    if ours.bare == one and theirs.bare == other:
        return None
    return ours.scale == theirs.scale and _same(ours.bare, theirs.bare, depth - 1)


def _numbers(one: str, other: str, depth: int) -> bool | None:
    """Compare numbers. If only one has a per cent sign, 50% equals both 50 and 0.5."""
    ours = read_number(one)
    theirs = read_number(other)
    if ours is None or theirs is None:
        return None
    rounded = ours.rounded or theirs.rounded
    if values_near(ours.value, theirs.value, rounded):
        return True
    if ours.percent == theirs.percent:
        return False
    part, whole = (ours, theirs) if ours.percent else (theirs, ours)
    return values_near(part.value / 100, whole.value, rounded)


def _numerals(one: str, other: str, depth: int) -> bool | None:
    """Compare numerals with a base by their digits, and by the base if both state one."""
    ours = _BASE.fullmatch(one)
    theirs = _BASE.fullmatch(other)
    if not (ours or theirs):
        return None
    if not all(match or _DIGITS.fullmatch(text) for match, text in ((ours, one), (theirs, other))):
        return False
    digits = {(match[1] if match else text).lstrip("0") for match, text in ((ours, one), (theirs, other))}
    bases = {_BASES.get(base.lower(), base) for match in (ours, theirs) if match for base in (match[2] or match[3],)}
    return len(digits) == len(bases) == 1


def _matrices(one: str, other: str, depth: int) -> bool | None:
    """Compare matrices by their entries in order."""
    matches = [_MATRIX.fullmatch(text) for text in (one, other)]
    if matches == [None, None]:
        return None
    rows = [
        [row.split("&") for row in re.split(r"\\\\", match[2].strip()) if row.strip()] for match in matches if match
    ]
    if len(rows) < 2 or [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    return all(_in_order(ours, theirs, depth) for ours, theirs in zip(*rows, strict=True))


def _words(one: str, other: str, depth: int) -> bool | None:
    """Compare texts that are not formulas: words, letters of a choice, names of points in order."""
    words = [_WORDS.fullmatch(text) for text in (one, other)]
    if not any(words):
        return None
    if _letters(one) == _letters(other):
        return True
    return False if all(words) else None


def _letters(text: str) -> str:
    return re.sub(r"[\s(){}]+|[.,;:](?!\d)", "", _TEXTS.sub(r"\1", text)).casefold()


def _members(one: str, other: str, depth: int) -> bool | None:
    r"""Compare x \in [0, 1] with [0, 1]. If both have a name, the names must be equal."""
    names = [_MEMBER.match(text) for text in (one, other)]
    if not any(names):
        return None
    read = [read_interval(_chain(text) or text).name for text in (one, other)]
    stated = {*filter(None, read), *(name[1] for name in names if name)}
    ours, theirs = (text[name.end() if name else 0 :] for name, text in zip(names, (one, other), strict=True))
    return len(stated) == 1 and _same(ours, theirs, depth - 1)


def _sets(one: str, other: str, depth: int) -> bool | None:
    r"""Compare sets of real numbers with rational ends as SymPy's sets: \mathbb{R}\setminus\{2\}, x \ne 2 and
    (-\infty, 2) \cup (2, \infty) are one set. True or undecided: ends of other kinds are compared part by part."""
    if not any(_SET.search(text) for text in (one, other)):
        return None
    names: set[str] = set()
    ours, theirs = (_real_set(text, names) for text in (one, other))
    return True if ours is not None and ours == theirs and not ours.is_empty and len(names) < 2 else None


def _real_set(text: str, names: set[str]) -> Candidate | None:
    """SymPy's set of real numbers that a text states; None if it states none. Names of its variable go to `names`."""
    from sympy import Complement, FiniteSet, Intersection, Interval, Reals, Union, oo

    if member := _MEMBER.match(text):
        names.add(member[1])
        text = text[member.end() :]
    listed = read_list(text)
    for kind, parts in ((Union, split_parts(text, "\\cup")), (Complement, re.split(r"\\setminus ?|-(?=\\\{)", text))):
        if 1 < len(parts) <= MOST:
            return _combined(kind, parts, names)
    if listed.joined in ({"or"}, {"and"}) and all(_RELATED.search(part) for part in listed.entries[:MOST]):
        found = _combined(Union if listed.joined == {"or"} else Intersection, listed.entries[:MOST], names)
        return None if isinstance(found, FiniteSet) else found  # "and" may stand for "or"
    if match := _DOMAIN.fullmatch(text):
        return Interval.open(0, oo) if match[1] == "+" else Interval.open(-oo, 0) if match[1] == "-" else Reals
    if (builder := _BUILDER.fullmatch(text)) and is_closed(text[2:-2]):
        names.add(builder[1])
        return _real_set(builder[3], names) if _is_plain(builder) else None
    if match := re.fullmatch(r"(?:([a-zA-Z])\\ne ?|\\text\{all real numbers except\})(.+)", text):
        names.update(filter(None, [match[1]]))
        text = f"\\{{{match[2]}\\}}"
        return None if (points := _real_set(text, names)) is None else Complement(Reals, points)
    kind, entries = bracketed_entries(text) or ("", [])
    if kind == "\\{\\}":
        values = [_end(entry) for entry in entries]
        return None if None in values or len(values) > MOST else FiniteSet(*values)
    name, brackets, ends = read_interval(text)
    low, high = (_end(end) for end in ends) if ends else (None, None)
    if low is None or high is None or not re.fullmatch(r"[a-zA-Z]?|\|[a-zA-Z]\|", name):
        return None
    names.update(filter(None, [name.strip("|")]))
    left, right = (mark in "()" for mark in brackets)
    if not name.startswith("|"):
        return Interval(low, high, left, right)
    inside = (low, high, left, right) if high != oo else (-oo, low, True, not left)  # |x| < 3, or the rest of |x| > 3
    if inside[0] != -oo:
        return None
    near = Interval(-inside[1], inside[1], inside[3], inside[3])
    return near if high != oo else Complement(Reals, near)


def _combined(kind: Candidate, parts: Sequence[str], names: set[str]) -> Candidate | None:
    sets = [_real_set(part, names) for part in parts]
    return None if any(each is None for each in sets) else kind(*sets)


def _end(text: str) -> Candidate | None:
    """SymPy's number for an end of an interval that is rational or infinite; None for any other."""
    from sympy import Rational, oo

    if match := re.fullmatch(r"([+-]?)\\infty ?", text):
        return -oo if match[1] == "-" else oo
    number = read_number(text)
    return Rational(number.value.numerator, number.value.denominator) if number and not number.percent else None


def _vectors(one: str, other: str, depth: int) -> bool | None:
    r"""Compare \langle 1, 2 \rangle with (1, 2) and with the matrix of one column."""
    found = [_VECTOR.fullmatch(text) for text in (one, other)]
    if found == [None, None]:
        return None
    column = next((match for text in (one, other) if (match := _MATRIX.fullmatch(text))), None)
    texts = [
        match[1] if match else (column[2].replace("\\\\", ",") if column else text)
        for match, text in zip(found, (one, other), strict=True)
    ]
    first, second = (text if text[:1] in "([" else f"({text})" for text in texts)
    return "&" not in first + second and _brackets(first, second, depth)


def _assignments(one: str, other: str, depth: int) -> bool | None:
    """Compare values that are given to different names: x = 1, y = 2 equals (x, y) = (1, 2), and, in the order of the
    names, (1, 2). It is not 2, 1."""
    found = [_assigned(text) for text in (one, other)]
    if found == [None, None]:
        return None
    ours, theirs = found
    if ours is not None and theirs is not None:
        return ours.keys() == theirs.keys() and all(_same(ours[name], theirs[name], depth - 1) for name in ours)
    given, text = (ours, other) if ours is not None else (theirs or {}, one)
    values = [given[name] for name in sorted(given)] if all(map(_LETTER.match, given)) else [*given.values()]
    kind, entries = bracketed_entries(text) or ("()", split_parts(AND.sub(",", text), ","))
    return kind == "()" and "=" not in text and _in_order(values, entries, depth)


def _assigned(text: str) -> dict[str, str] | None:
    """Names and values; None if there are not two names, or one of them has two values."""
    if pair := _TUPLE.fullmatch(text):
        names, values = (split_parts(part, ",") for part in pair.groups())
    elif read_list(text).joined == {"or"}:
        return None
    else:
        sides = [split_parts(part, "=") for part in split_parts(AND.sub(",", text), ",")]
        if any(len(each) != 2 for each in sides):
            return None
        names, values = ([each[place] for each in sides] for place in (0, 1))
    is_named = len(names) == len(values) == len(set(names)) > 1 and all(map(NAME.fullmatch, names))
    is_named = is_named and len({name.partition("_")[0] for name in names}) > 1  # x_1 and x_2 are values of one x
    return dict(zip(names, values, strict=True)) if is_named else None


def _relations(one: str, other: str, depth: int) -> bool | None:
    """Compare chains of relations: 1 < x <= 3 equals 3 >= x > 1, (1, 3], and x > 1 and x <= 3. SymPy does others."""
    chains = [_chain(text) for text in (one, other)]
    if any(chains) and not all(chains):
        one, other = chains[0] or one, chains[1] or other
    ours, theirs = ([part.strip() for part in RELATION.split(text)] for text in (one, other))
    if len(ours) == len(theirs) == 1 or any(
        AND.search(text) or len(split_parts(text, ",")) > 1 for text in ours + theirs
    ):
        return None
    if any(len(split_parts(text, ",", "\\cup")) > 1 for text in (one, other)):  # of sets, each with its relation
        return None
    if len(ours) > 1 and len(theirs) > 1:
        turned = [TURNED.get(part, part) for part in reversed(theirs)]
        if any(ours[1::2] == parts[1::2] and _in_order(ours[::2], parts[::2], depth) for parts in (theirs, turned)):
            return True
        return None if len(ours) == len(theirs) == 3 else False
    first = read_interval(one)
    second = read_interval(other)
    if not (first.ends and second.ends):
        return None
    if "|" in first.name + second.name and first.name != second.name:  # |x| > 1 is no interval
        return False
    return first.brackets == second.brackets and _in_order(first.ends, second.ends, depth)


def _chain(text: str) -> str:
    """The chain that `chain_of` finds; empty if its ends do not ascend, because "and" may stand for "or" then."""
    sides = RELATION.split(found := chain_of(text))[::2]
    numbers = [number.value for side in sides if (number := read_number(side.strip()))]
    falls = bool(found) and lies_within(f"({sides[0]})-({sides[-1]})", Fraction(0), Fraction(10**12))
    return "" if falls or any(low >= high for low, high in pairwise(numbers)) else found


class _Equation(NamedTuple):
    names: set[str]
    values: list[str]


def _equations(one: str, other: str, depth: int) -> bool | None:
    r"""Compare equations. x = 5, f(2) = 5 and 2 + 3 = 5 equal 5, and 14/3 \approx 4.67 equals each of its sides. If
    both have names, the names must be equal. An equation that states no value (x + y = 2) equals only equations. 3 = 5
    is wrong."""
    texts = (one, other)
    sides = [split_parts(text, "=", "\\approx") if not is_list(text) else [text] for text in texts]
    if len(sides[0]) == len(sides[1]) == 1:
        return None
    if max(map(len, sides)) > _SIDES or any(len(text) > LONGEST for text in texts):
        return False
    ours, theirs = (_equation(text, parts, depth) for text, parts in zip(texts, sides, strict=True))
    named = ours.names and theirs.names and not ours.names & theirs.names
    if not named and any(_same(a, b, depth - 1) for a in ours.values for b in theirs.values):
        return True
    return all(len(each) == 2 for each in sides) and "\\approx" not in one + other and formulas_equal(one, other)


def _equation(text: str, sides: list[str], depth: int) -> _Equation:
    """The names and values of an equation; no values if its sides contradict each other, or if it has to be solved."""
    if len(sides) == 1:
        return _Equation(set(), sides)
    names = {side for side in sides if NAME.fullmatch(side)}
    values = [side for side in sides if side not in names]
    agree = all(_agree(a, b, "\\approx" in text, depth) for a, b in zip(values, values[1:], strict=False))
    return _Equation(names, values if agree else [])


def _agree(one: str, other: str, nearly: bool, depth: int) -> bool:
    """Whether two sides of an equation are consistent: a decimal, or with `nearly` any number, may be rounded."""
    if _same(one, other, depth - 1):
        return True
    given = [
        (text, found)
        for text in (one, other)
        if (found := read_number(text)) and (found.rounded or (nearly and found.value.denominator == 1))
    ]
    if not given:
        return False
    text, found = min(given, key=lambda each: _places(each[0]))
    unit = Fraction(1, 10 ** _places(text)) / 2
    low, high = (found.value + sign * unit for sign in (-1, 1))
    rest = other if text == one else one
    if (exact := read_number(rest)) is not None:
        return low <= exact.value <= high
    return lies_within(rest, low, high)


def _places(text: str) -> int:
    """The number of digits after the point."""
    return sum(map(str.isdigit, read_quantity(text).bare.partition(".")[2]))


def _unions(one: str, other: str, depth: int) -> bool | None:
    """Compare unions in any order; x < 1 or x > 3 is also a union."""
    parts = [split_parts(text, "\\cup") for text in (one, other)]
    if len(parts[0]) == len(parts[1]) == 1:
        return None
    parts = [each if len(each) > 1 else _alternatives(each[0]) for each in parts]
    return _matched(parts[0], parts[1], depth)


def _alternatives(text: str) -> list[str]:
    found = read_list(text)
    return found.entries if found.joined == {"or"} else [text]


def _brackets(one: str, other: str, depth: int) -> bool | None:
    """Compare (a, b) and [a, b) by their brackets, and their entries in order. A tuple's brackets are optional."""
    ours = bracketed_entries(one)
    theirs = bracketed_entries(other)
    if ours is None and theirs is None:
        return None
    if ours and theirs:
        if ours[0] != theirs[0]:
            return False
        return None if ours[0] == "\\{\\}" else _in_order(ours[1], theirs[1], depth)
    (kind, entries), loose = (ours, other) if ours else (theirs or ("", []), one)
    if kind == "\\{\\}":
        return None
    return kind == "()" and is_list(loose) and _in_order(entries, split_parts(loose, ","), depth)


def _lists(one: str, other: str, depth: int) -> bool | None:
    r"""Compare lists such as 1, 2 and 3 in any order. Braces around them are optional, "or" differs from "and", and a
    comma matches either."""
    ours = read_list(one)
    theirs = read_list(other)
    if ours.entries == [one] and theirs.entries == [other]:
        return None
    if ours.name != theirs.name and ours.name and theirs.name:
        return False
    if ours.joined != theirs.joined and ours.joined and theirs.joined:
        return False
    return _matched(ours.entries, theirs.entries, depth)


def _ratios(one: str, other: str, depth: int) -> bool | None:
    """Compare a : b : c entry by entry. Ratios of numbers are also compared in reduced form, unless both may be times
    of day. A ratio of two numbers equals their quotient."""
    ours, theirs = (split_parts(text, ":") for text in (one, other))
    if len(ours) == len(theirs) == 1:
        return None
    if len(ours) == len(theirs) and _in_order(ours, theirs, depth):
        return True
    if _TIME.fullmatch(one) and _TIME.fullmatch(other):
        return False
    numbers = [[read_number(part) for part in parts] for parts in (ours, theirs)]
    first, second = ([each.value for each in found if each] for found in numbers)
    if (len(first), len(second)) != (len(ours), len(theirs)):
        return None if min(len(ours), len(theirs)) == 1 else False
    if len(first) != len(second):
        short, long = sorted((first, second), key=len)
        return len(long) == 2 and short[0] * long[1] == long[0]
    return all(a * second[0] == b * first[0] for a, b in zip(first, second, strict=True)) and any(first)


_COMPARISONS: tuple[Callable[[str, str, int], bool | None], ...] = (
    _sequences,
    _builders,
    _options,
    _quantities,
    _vectors,
    _matrices,
    _words,
    _sets,
    _members,
    _assignments,
    _relations,
    _equations,
    _unions,
    _brackets,
    _lists,
    _numerals,
    _ratios,
)


def _in_order(ours: Sequence[str], theirs: Sequence[str], depth: int) -> bool:
    return len(ours) == len(theirs) and all(_same(a, b, depth - 1) for a, b in zip(ours, theirs, strict=True))


def _matched(ours: Sequence[str], theirs: Sequence[str], depth: int) -> bool:
    """Whether the entries can be paired so that each equals its partner, independent of their order."""
    if len(ours) != len(theirs) or len(ours) > MOST:
        return len(ours) == len(theirs) and _in_order(ours, theirs, depth)
    partner: dict[int, int] = {}

    def pair(place: int, tried: set[int]) -> bool:
        for candidate, entry in enumerate(theirs):
            if candidate not in tried and _same(ours[place], entry, depth - 1):
                tried.add(candidate)
                if candidate not in partner or pair(partner[candidate], tried):
                    partner[candidate] = place
                    return True
        return False

    return all(pair(place, set()) for place in range(len(ours)))
