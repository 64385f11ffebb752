"""Compares two formulas: math-verify parses them and their numeric values decide. SymPy's solver is the last resort.

Values are compared with hundreds of digits, relative to their size, and rational numbers exactly. (math-verify
subtracts and rounds to 15 places, so to it any two tiny numbers are equal.) Formulas that would take minutes or
gigabytes are not evaluated.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeAlias

Candidate: TypeAlias = Any
"""What math-verify reads in a text: the text itself, or a SymPy object, which has no types."""
LONGEST = 1_000
"""Largest number of characters in a formula that is given to SymPy."""
TOLERANCE = Fraction(1, 2_000_000)
"""Absolute tolerance of a decimal: six places, as in math-verify. Fractions and whole numbers are compared exactly."""
RELATIVE = Fraction(1, 10_000)
"""Tolerance of a decimal relative to the larger value, for small values: 0.0000003 has no digit within six places."""
_DEEPEST = 15
"""Deepest nesting of brackets in a formula that is given to SymPy, which takes exponential time for some."""
_DIGITS = 200
"""Number of digits with which a formula with variables is evaluated, followed by an evaluation with twice as many."""
_MANY = 1_000
"""The same for a formula without variables."""
_EQUAL = Fraction(1, 10**150)
"""Largest relative difference of equal values that are computed with `_DIGITS` digits."""
_BITS = 200_000
"""Largest size of a whole number that is computed exactly."""
_SHORT = 1_000
"""Largest size of an exponent, or of the argument of a function."""
_POINTS = ((137, 101), (1789, 101), (-157, 101), (61, 103), (-907, 89))
"""Variables get these values in turn, plus multiples of 17/97. In the third, every second variable has the opposite
sign."""

_SENSELESS = (ArithmeticError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError)
"""Exceptions that SymPy raises for formulas without meaning, and `_value` for values that are too large."""
_TOWER = re.compile(
    r"\^\{[^{}^a-zA-Z]{0,20}\^|\^(?:\d+|[a-zA-Z])\^|\^\{?\(?-?\d{5}|[+-][^()]*\)\^\{?\d{3}|\d{5,}\)?!|!!|\d{5,}.{0,3}\\choose|\\binom\{?\d{5}"
)
"""Formulas for which SymPy takes minutes: powers of powers of numbers, high powers of sums, large factorials and
binomials."""
_SCIENTIFIC = re.compile(r"(?<=\d)E([+-]?\d+)")
_EULER = re.compile(r"(?<=\d)E(?=[+-]\d)")
"""2e-1 may also mean twice Euler's number less one."""
_HEAVY = re.compile(r"\\(?:sum|prod|int|lim|oint|iint)(?![a-z])")

_UNREADABLE = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u2423]")
"""What no formula has: words in characters, of which math-verify would read the rest, and `canonical.GAP`."""
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|\.\d+|\\frac\{\d+\}\{\d+\}|\(-?\d+(?:\.\d+)?\))\^\\circ ?")


def formulas_equal(one: str, other: str) -> bool:
    """Whether two formulas are equal. False, without evaluation, if one of them would take minutes or gigabytes. Sums,
    integrals and limits are evaluated anyway (`is_heavy`)."""
    if any(len(text) > LONGEST or nesting_depth(text) > _DEEPEST or _TOWER.search(text) for text in (one, other)):
        return False
    if one.count("'") != other.count("'") or _UNREADABLE.search(one + other):
        return False
    one, other = map(_in_radians, (one, other))
    if not (one and other):
        return False
    first, second = sorted((one, other))  # math-verify's verdict may depend on the order
    try:
        return any(_same(a, b) for a in _parsed(first) for b in _parsed(second))
    except _SENSELESS:
        return False


def _in_radians(formula: str) -> str:
    r"""A formula whose functions of angles have these in radians: math-verify reads \sin 30^\circ as \sin 30. Empty if
    an angle is in degrees that are no number, or in minutes."""
    if "\\circ" not in formula or not _FUNCTION.search(formula):
        return formula
    found = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", formula)
    return "" if "\\circ" in found or "'" in found else found


def is_heavy(latex: str) -> bool:
    """Whether a formula has a sum, a product, an integral or a limit, whose evaluation may take arbitrarily long."""
    return _HEAVY.search(latex) is not None


def verify_response(answer: str, response: str) -> bool:
    r"""math-verify's verdict on a whole response: compares what it extracts from the response with what it extracts
    from `\boxed{answer}`. The limits of `formulas_equal` do not apply; the worker's limits of time and memory end a
    call."""
    from math_verify import verify

    return bool(
        verify(extract_expressions(f"\\boxed{{{answer}}}"), extract_expressions(response), timeout_seconds=None)
    )


def nesting_depth(text: str) -> int:
    """The depth of nested brackets."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def values_near(one: Fraction, other: Fraction, rounded: bool) -> bool:
    """Whether two values are equal: exactly, or within the tolerance of a decimal if one is `rounded`."""
    return abs(one - other) <= (min(TOLERANCE, max(abs(one), abs(other)) * RELATIVE) if rounded else 0)


def lies_within(formula: str, low: Fraction, high: Fraction) -> bool:
    """Whether a formula is a number between two bounds."""
    if len(formula) > LONGEST or nesting_depth(formula) > _DEEPEST or _TOWER.search(formula) or _HEAVY.search(formula):
        return False
    from sympy import Expr

    constants = [
        each for each in _parsed(_in_radians(formula) or "x") if isinstance(each, Expr) and not each.free_symbols
    ]
    try:
        values = [_value(_exact(each), {}) for each in constants]
    except _SENSELESS:
        return False
    return any(value is not None and not value[1] and low <= value[0] <= high for value in values)


@lru_cache(maxsize=256)
def _parsed(latex: str) -> tuple[Any, ...]:
    if "E" in latex and (power := _SCIENTIFIC.sub(r"\\cdot10^{\1}", latex)) != latex:
        return (*_parsed(power), *(_parsed(_EULER.sub("e", latex)) if _EULER.search(latex) else ()))
    # A remaining "$" separates text from formulas: then the whole is a sentence, not a formula.
    if "$" in latex:
        return tuple(extract_expressions(latex))
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig

    whole = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
    )
    return tuple(extract_expressions(f"${latex}$", [LatexExtractionConfig(normalization_config=whole)]))


def extract_expressions(text: str, configuration: list[Any] | None = None) -> list[Any]:
    """math-verify's candidates for the expression in a text: SymPy objects and the text itself; empty if there is none.

    math-verify's own time limit is switched off, because it uses SIGALRM, which works only in the main thread. The
    worker's limit ends a call.
    """
    from math_verify import parse  # imported here: SymPy takes half a second, which `exact` does not need

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about the limit that is switched off
    given = {} if configuration is None else {"extraction_config": configuration}
    return list(parse(text, parsing_timeout=None, **given))


def _same(one: Candidate, other: Candidate) -> bool:
    """Whether two of math-verify's candidates are equal."""
    from math_verify import verify
    from sympy import Expr
    from sympy.core.relational import Relational

    if isinstance(one, str) or isinstance(other, str):
        return bool(one == other)
    verdict: bool | None = None
    if isinstance(one, Relational) and isinstance(other, Relational):
        verdict = _same_relation(one, other)
    elif isinstance(one, Expr) and isinstance(other, Expr):
        verdict = _same_value(_exact(one), _exact(other), rounded=_decimal(one) or _decimal(other))
    if verdict is not None:
        return verdict
    if _tiny(one) or _tiny(other):
        return False
    return bool(verify(one, other, timeout_seconds=None, allow_set_relation_comp=True))


def _decimal(expression: Candidate) -> bool:
    from sympy import Float

    return bool(expression.has(Float))


def _exact(expression: Candidate) -> Candidate:
    """The expression with decimals as fractions, per cent signs evaluated, and i as the imaginary unit."""
    from sympy import Float, I, UnevaluatedExpr

    expression = expression.replace(UnevaluatedExpr, lambda inner: inner)
    changed = {number: _decimal_fraction(str(number)) for number in expression.atoms(Float)}
    imaginary = {symbol: I for symbol in expression.free_symbols if symbol.name == "i"}
    return expression.xreplace({**changed, **imaginary})


def _decimal_fraction(digits: str) -> Candidate:
    from sympy import Rational

    value = Fraction(digits)
    return Rational(value.numerator, value.denominator)


def _same_value(one: Candidate, other: Candidate, rounded: bool) -> bool | None:
    """Whether two expressions have the same value, with variables at several points; None if numbers cannot decide.

    Where both leave the real numbers, branches of roots and logarithms may differ, so such a point is skipped.
    """
    from sympy import I

    if not (one.free_symbols or other.free_symbols):
        return _same_constant(one, other, rounded)
    is_complex = one.has(I) or other.has(I)
    agreed = 0
    for a, b in _values(one, other):
        if not is_complex and (a[1] or b[1]):
            if bool(a[1]) != bool(b[1]):
                return False
            continue
        if not _close(a, b, _EQUAL):
            return False
        agreed += 1
    return True if agreed > 1 else None


def _same_constant(one: Candidate, other: Candidate, rounded: bool) -> bool | None:
    exact = [(value, Fraction(0)) if (value := _rational(each)) is not None else None for each in (one, other)]
    values = [value or _value(each, {}, _MANY) for value, each in zip(exact, (one, other), strict=True)]
    a, b = values
    if a is None or b is None:
        return None
    if rounded and all(values_near(x, y, rounded=True) for x, y in zip(a, b, strict=True)):
        return True
    return _close(a, b, Fraction(0) if None not in exact else _EQUAL**4)


def _close(one: tuple[Fraction, Fraction], other: tuple[Fraction, Fraction], bound: Fraction) -> bool:
    size = max(map(abs, (*one, *other)))
    return all(abs(a - b) <= bound * size for a, b in zip(one, other, strict=True))


def _values(one: Candidate, other: Candidate) -> Iterator[tuple[tuple[Fraction, Fraction], tuple[Fraction, Fraction]]]:
    """The values of both expressions at each point at which both have one."""
    from sympy import Rational

    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    for number, (above, below) in enumerate(_POINTS):
        sign = -1 if number == 2 else 1
        point = {
            symbol: (Rational(above, below) + Rational(17 * place, 97)) * sign**place
            for place, symbol in enumerate(symbols)
        }
        a = _value(one, point)
        b = _value(other, point)
        if a is not None and b is not None:
            yield a, b


def _value(expression: Candidate, point: dict[Any, Any], digits: int = _DIGITS) -> tuple[Fraction, Fraction] | None:
    """Real and imaginary part; None if it has no value.

    A change from doubling the digits is rounding error. If this error is not far smaller than the value, the value
    counts as zero if it is small. Raises OverflowError if it is not small, or if there are more than `_BITS` binary
    digits before or after the point.
    """
    rough, fine = (_parts(_evaluated(expression, point, count)) for count in (digits, 2 * digits))
    if rough is None or fine is None:
        return None
    size = max(map(abs, fine))
    if max(abs(a - b) for a, b in zip(rough, fine, strict=True)) > size / 10**20:
        if size > Fraction(1, 10 ** (digits // 4)):
            raise OverflowError
        return Fraction(0), Fraction(0)
    real, imaginary = (part if abs(part) > size * _EQUAL else Fraction(0) for part in fine)
    return real, imaginary


def _evaluated(expression: Candidate, point: dict[Any, Any], digits: int) -> Candidate | None:
    """The expression as a number, evaluated from the inside out, because SymPy's own evaluation takes exponential time
    in nested sums. None if it is not a number. Raises OverflowError if any part is too large."""
    from sympy import Add, Expr, Mul, Pow, Rational, Symbol, log

    if isinstance(expression, Symbol):
        return point[expression].evalf(digits) if expression in point else None
    if not expression.args:
        return expression.evalf(digits) if isinstance(expression, Expr) else None
    keeps = () if isinstance(expression, (Add, Mul)) else expression.args[1:] if isinstance(expression, Pow) else None
    arguments = [
        part if isinstance(part, Rational) and (keeps is None or part in keeps) else _evaluated(part, point, digits)
        for part in expression.args
    ]
    if None in arguments:
        return None
    if not isinstance(expression, (Add, Mul, log)):
        _check_size(_SHORT, *(arguments[1:] if isinstance(expression, Pow) else arguments))
    try:
        found = expression.func(*arguments).evalf(digits)
    except _SENSELESS:
        return None
    _check_size(_BITS, found)
    return found


def _check_size(most: int, *numbers: Candidate) -> None:
    """Raise OverflowError if a number has more than `most` binary digits before or after the point."""
    from sympy import Float

    parts = [part for each in numbers for part in each.atoms(Float) if part.is_finite]
    if any(abs(int(part._mpf_[2]) + int(part._mpf_[3])) > most for part in parts):
        raise OverflowError


def _parts(number: Candidate | None) -> tuple[Fraction, Fraction] | None:
    """Real and imaginary part of a number; None for anything else."""
    from sympy import Rational

    if number is None or not number.is_number or not number.is_finite:
        return None
    parts = number.as_real_imag()
    if not all(part.is_Float or part.is_Rational for part in parts):
        return None
    real, imaginary = (Fraction(int(exact.p), int(exact.q)) for exact in map(Rational, parts))
    return real, imaginary


def _rational(expression: Candidate) -> Fraction | None:
    """The exact value of arithmetic with rational numbers; None for any other expression, or a huge one."""
    from sympy import Add, Mul, Pow, factorial

    if expression.is_Rational:
        return Fraction(int(expression.p), int(expression.q))
    parts = [_rational(part) for part in expression.args]
    values = [part for part in parts if part is not None]
    if len(values) != len(parts) or not values:
        return None
    if isinstance(expression, Add):
        return sum(values, Fraction(0))
    if isinstance(expression, Mul):
        product = Fraction(1)
        for value in values:
            product *= value
        return product
    if isinstance(expression, Pow):
        return _power(*values)
    return Fraction(int(expression.doit())) if isinstance(expression, factorial) and values[0] < 10_000 else None


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    size = base.numerator.bit_length() + base.denominator.bit_length()
    if exponent.denominator != 1 or abs(exponent) * size > _BITS or (not base and exponent < 0):
        return None
    return base ** int(exponent)


def _same_relation(one: Candidate, other: Candidate) -> bool | None:
    """Whether one relation is a multiple of the other: 2x < 8 and 4 > x. None if it is not, but they may still have the
    same solutions. A relation without variables is a mistake."""
    from sympy import Add, Eq, Expr, Ge, Gt, Mul, Ne

    if not (one.free_symbols and other.free_symbols):
        return False
    if not all(isinstance(side, Expr) for each in (one, other) for side in (each.lhs, each.rhs)):
        return None
    ways = [
        (type(each), _exact(Add(each.lhs, Mul(-1, each.rhs, evaluate=False), evaluate=False))) for each in (one, other)
    ]
    signs = [-1 if kind in (Gt, Ge) else 1 for kind, _ in ways]
    kinds = [{Gt: "<", Ge: "<=", Eq: "=", Ne: "!="}.get(kind, kind.rel_op) for kind, _ in ways]
    if kinds[0] != kinds[1]:
        return False
    ratios = [
        (a[0] / b[0]) * signs[0] * signs[1]
        for a, b in _values(ways[0][1], ways[1][1])
        if not (a[1] or b[1]) and a[0] and b[0]
    ]
    if len(ratios) < 2 or any(abs(ratio - ratios[0]) > abs(ratios[0]) * _EQUAL for ratio in ratios):
        return None
    return True if kinds[0] in ("=", "!=") or ratios[0] > 0 else None


def _tiny(expression: Candidate) -> bool:
    """Whether a constant part is so small that math-verify would treat it as zero."""
    from sympy import Expr, preorder_traversal

    for part in preorder_traversal(expression):
        if isinstance(part, Expr) and not part.free_symbols and part.is_number:
            value = _value(part, {})
            if value is not None and 0 < max(map(abs, value)) < TOLERANCE:
                return True
    return False
