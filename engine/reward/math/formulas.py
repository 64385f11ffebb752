"""Whether two formulas are equal: math-verify's parser reads them, and a proof decides.

Without variables their values are compared, exactly or with a thousand digits. With variables they are equal if their
difference, with exponentials for functions of angles and multiplied by its denominators, expands to nothing; no value
at a point says so. What isn't read with certainty, or would take long, equals only its own text.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache, wraps
from itertools import accumulate
from math import comb, prod
from typing import Any, TypeAlias, TypeVar

from engine.reward.math.canonical import BRACES, GREEK

T = TypeVar("T")
Candidate: TypeAlias = Any
"""A SymPy object, which has no types."""
LONGEST = 1_000
"""Largest number of characters in a formula that is given to SymPy."""
_TOLERANCE = Fraction(1, 2_000_000)
_RELATIVE = Fraction(1, 10_000)
"""Tolerance of a decimal: six places, as in math-verify, and of a small one in relation to its value."""
_DEEPEST = 15
"""Deepest nesting of brackets in a formula; half of it for functions, of which the parser takes exponential time."""
_BITS = 200_000
"""Largest size of a power that is computed exactly."""
_TERMS = 500
"""Largest number of terms that a difference may expand to."""
_SENSELESS = (ArithmeticError, AttributeError, LookupError, NameError, RuntimeError, SyntaxError, TypeError, ValueError)
"""What SymPy raises for formulas without meaning, and `_check` for large ones."""
_FUNCTION = r"\\(?:(?:arc)?(?:sin|cos|tan)|(?:sin|cos|tan)h|cot|sec|csc|log|ln|exp)(?![a-zA-Z])"
_SCRIPTS = rf"(?:[\^_](?:\w|{BRACES}))*+"
_ARGUMENTS = rf"(?:\[\w+\])?(?:{BRACES})++"
_FACTOR = rf"(?:[\d.]+|[a-zA-Z]|\\(?:{GREEK})(?![a-zA-Z]) ?|\\(?:frac|binom|sqrt){_ARGUMENTS}|\|[^|]*\|){_SCRIPTS}"
_END = rf"(?=$|[-+,)}}&]|\|(?:$|[)}}+])|\\(?:cdot|\\|rfloor|rceil|end)|{_FUNCTION})"
_ARGUMENT = re.compile(rf"({_FUNCTION}{_SCRIPTS}) ?({BRACES}|(?:{_FACTOR})++){_END}")
"""What a function without brackets is applied to: factors up to a sign, so that \\ln 2\\cdot 3 is 3\\ln 2."""
_QUOTIENT = re.compile(r"(?<![\w.^/)}])(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)(?![\d.^!])")
_MIXED = re.compile(r"(?<![\d.^_])(\d+)(\\frac\{\d+\}\{\d+\})")
_REFUSED = re.compile(
    r"\^\{[^{}^a-zA-Z]{0,20}\^|\^(?:\d+|[a-zA-Z])\^|\^\{?\(?-?\d{5}|[+-][^()]*\)\^\{?\d{3}|\d{5,}\)?!|!!"
    r"|\d{5,}.{0,3}\\choose|\\binom\{?\d{5}|(?:\|[^|]*){13}|\\(?:frac|binom)\{[^{}]*\}(?!\{)|\^\w!|\^T|_\w_|\.\d+\."
    r"|\\[A-Z]|\|[^|]*[\w)}]\|[\w(\\][^|]*[\w)}]\|"
    rf"|(?:/|\\div) ?(?!(?:{_FACTOR}|{_FUNCTION}{_SCRIPTS}\([^()]*\)|\([^()]*\){_SCRIPTS}|{BRACES})!?(?:/|{_END}))"
    rf"|{_FUNCTION}{_SCRIPTS} ?+(?!\()"
)
"""What the parser itself would take minutes for: powers of powers of numbers, large factorials and binomials, many
bars. What it would guess: \\Delta, which it lowers, a fraction's second argument, where bars or arguments end."""
_READ = re.compile(
    rf"(?:{_FUNCTION}|\\(?:{GREEK}|(?:frac|binom)(?=\{{)|sqrt(?=[{{[(])|cdot|div|infty|max|min"
    r"|[lr](?:floor|ceil)|(?:vec|bar|hat|overline|overrightarrow)(?=\{)|(?:begin|end)\{[pb]?matrix\})(?![a-zA-Z])"
    r"|\\\\|(?<=\\sqrt)\[\w+\]|(?<=[a-zA-Z}])_|[a-zA-Z0-9 .,|!+*/^(){}&-])+"
)
"""What a formula consists of. Of anything else the parser may read a part only: \\not= 7, [7], 7', \\text."""
_LETTERS = re.compile(r"\\[a-zA-Z]+|([A-Z]{2,}|[a-zA-Z])")
ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|\.\d+|\\frac\{\d+\}\{\d+\}|\(-?\d+(?:\.\d+)?\))\^\\circ ?")


def _provable(function: Callable[..., T]) -> Callable[..., T | None]:
    """The function, with a thousand digits for values; None where SymPy raises an error, or `_check` does."""

    @wraps(function)
    def call(*arguments: object) -> T | None:
        from mpmath import workdps

        try:
            with workdps(1000):
                return function(*arguments)
        except _SENSELESS:
            return None

    return call


@_provable
def same_formula(one: str, other: str) -> bool:
    """Whether two canonical formulas are equal. Not if one of them isn't read or would take long."""
    first, second = map(read_formula, (one, other))
    if not _same_letters(one, other) or getattr(first, "shape", ()) != getattr(second, "shape", ()):
        return False
    return all(map(_same, first, second)) if hasattr(first, "shape") else _same(first, second, "." in one + other)


@_provable
def same_equation(one: list[str], other: list[str]) -> bool:
    """Whether two equations have the same two sides, or state multiples of one polynomial: 2x = 8 and 4 = x."""
    if any(all(map(same_formula, one, pair)) for pair in (other, other[::-1])):
        return True
    if not all(_parse(side).is_polynomial() for side in (*one, *other)):  # a multiple may have other solutions
        return False
    ours, theirs = (_terms(read_formula(left) - read_formula(right)) for left, right in (one, other))
    if ours.keys() != theirs.keys() or all(term.is_number for term in ours):
        return False
    pairs = [(ours[term], theirs[term]) for term in ours]
    mine, yours = pairs[0]
    return _same_letters("+".join(one), "+".join(other)) and all(_same(a * yours, b * mine) for a, b in pairs)


@_provable
def constant(latex: str) -> Fraction | None:
    """The value of a real formula without variables, exactly or to three hundred digits; None for anything else."""
    if (found := read_formula(latex)).is_Rational:
        return Fraction(found)
    return Fraction(int(_values(found)[0] * 10**300), 10**300)


def values_near(one: Candidate, other: Candidate, rounded: bool) -> bool:
    """Whether two values are equal: exactly, or within the tolerance of a decimal if one is `rounded`."""
    return bool(abs(one - other) <= (min(_TOLERANCE, max(abs(one), abs(other)) * _RELATIVE) if rounded else 0))


def verify_response(answer: str, response: str) -> bool:
    r"""math-verify's verdict on a whole response: compares what it extracts from the response with what it extracts
    from `\boxed{answer}`. No limits apply; the worker's limits of time and memory end a call."""
    from math_verify import verify

    return bool(verify(_parsed(f"\\boxed{{{answer}}}"), _parsed(response), timeout_seconds=None))


@lru_cache(maxsize=256)
def read_formula(latex: str) -> Candidate:
    """A canonical formula as SymPy's expression or matrix, with decimals as fractions. Raises an error of `_SENSELESS`
    if it has none, or may take long."""
    from sympy import Expr, MatrixBase, nan, zoo

    exact = _exact(_parse(latex))
    if not isinstance(exact, (Expr, MatrixBase)) or exact.has(nan, zoo):
        raise ValueError(latex)
    return exact


@lru_cache(maxsize=256)
def _parse(latex: str) -> Candidate:
    """math-verify's reading as it is written."""
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig

    latex = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", latex) if ANGLE.search(latex) else latex
    latex = _MIXED.sub(r"(\1+\2)", _QUOTIENT.sub(r"\\frac{\1}{\2}", latex))
    for _ in range(_DEEPEST // 2):  # functions in the arguments of functions
        latex = _ARGUMENT.sub(r"\1(\2)", latex)
    depth = max(accumulate((mark in "([{") - (mark in ")]}") for mark in latex), default=0)
    depth = max(depth, 2 * min(depth, len(re.findall(_FUNCTION, latex))))
    if not _READ.fullmatch(latex) or _REFUSED.search(latex) or len(latex) > LONGEST or depth > _DEEPEST:
        raise ValueError(latex)
    whole = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="all")
    found = _parsed(f"${latex.replace('gamma', 'varsigma')}$", [LatexExtractionConfig(normalization_config=whole)])
    return next(each for each in [*found, None] if not isinstance(each, str))


def _parsed(text: str, configuration: list[Any] | None = None) -> list[Any]:
    """math-verify's candidates for the expression in a text: SymPy objects and the text itself; empty if there is none.

    Its time limit is switched off, because it uses SIGALRM, which works only in the main thread.
    """
    from math_verify import parse  # imported here: SymPy takes half a second, which `exact` does not need

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about the limit that is switched off
    given = {} if configuration is None else {"extraction_config": configuration}
    return list(parse(text, parsing_timeout=None, **given))


def _exact(part: Candidate) -> Candidate:
    """The expression with decimals as fractions, i as the imaginary unit and other symbols as complex numbers, put
    together anew by SymPy's own rules. Raises OverflowError for a large exponent or argument."""
    from sympy import Float, Function, I, MatMul, MatrixBase, Pow, Rational, Symbol, UnevaluatedExpr, exp, log

    if isinstance(part, MatrixBase):
        return part.applyfunc(_exact)
    if isinstance(part, Float):
        return Rational(str(part))
    if isinstance(part, Symbol):
        return I if part.name == "i" else Symbol(part.name)
    arguments = [*map(_exact, part.args)]
    if isinstance(part, (UnevaluatedExpr, MatMul)):
        return prod(arguments)
    if isinstance(part, Pow) and all(each.is_Rational for each in arguments):
        bits = int(arguments[0].p).bit_length() + int(arguments[0].q).bit_length()
        _check(abs(arguments[1]) * bits, _BITS if arguments[1].is_Integer else _BITS // 200)
    elif isinstance(part, (Pow, Function)) and not isinstance(part, log):
        for each in arguments[isinstance(part, Pow) :]:
            _check(abs(each).evalf(5) if each.is_number else 0, _BITS if isinstance(part, (Pow, exp)) else 10**300)
    if isinstance(part, Pow) and arguments[0].is_negative and arguments[1].is_Rational and arguments[1].q % 2:
        return (-1) ** int(arguments[1].p) * (-arguments[0]) ** arguments[1]  # the real root
    return part.func(*arguments) if arguments else part


def _check(size: Candidate, most: int) -> None:
    if size > most:
        raise OverflowError


def _same_letters(one: str, other: str) -> bool:
    """Whether capital letters are the same: the parser takes X for x. Two of them are the name of points, which has an
    order."""
    ours, theirs = ({*filter(None, _LETTERS.findall(text))} for text in (one, other))
    capitals = {letter for letter in ours | theirs if letter.isupper()}
    return capitals <= ours & theirs and not any(len(each) > 1 or each.lower() in ours | theirs for each in capitals)


def _same(one: Candidate, other: Candidate, rounded: bool = False) -> bool:
    """Whether two expressions are equal: by a proof if they have variables, else if the parts of their difference
    cancel each other to six hundred digits."""
    from sympy import Add

    if one.is_Rational and other.is_Rational:
        return values_near(Fraction(one), Fraction(other), rounded)
    if one == other:
        return True
    if one.free_symbols or other.free_symbols:
        return all(_same(factor, factor * 0) for factor in _terms(one - other).values())
    ours, theirs = _values(one, other)
    values = _values(*Add.make_args(one - other))
    return values_near(ours, theirs, rounded) or bool(abs(sum(values)) * 10**600 <= max(map(abs, values)))


def _values(*numbers: Candidate) -> list[Candidate]:
    """Values with a thousand digits. Raises an error of `_SENSELESS` if there are none."""
    from mpmath import mpc
    from sympy import Dummy, I, ceiling, floor, lambdify, oo

    if any(number.has(floor, ceiling, oo, -oo) for number in numbers):  # the floor of a whole number may be one less
        raise ValueError
    imaginary = Dummy()
    return list(lambdify([imaginary], [number.xreplace({I: imaginary}) for number in numbers], "mpmath")(mpc(0, 1)))


def _terms(difference: Candidate) -> dict[Candidate, Candidate]:
    """The numerator of an expression, expanded: constant factors by the products of variables and functions of them.
    Raises OverflowError for many terms."""
    from sympy import Add, exp, expand
    from sympy.functions.elementary.hyperbolic import HyperbolicFunction
    from sympy.functions.elementary.trigonometric import TrigonometricFunction

    difference = difference.rewrite([TrigonometricFunction, HyperbolicFunction], exp)
    _size(difference)
    found: dict[Candidate, Candidate] = {}
    for term in Add.make_args(expand(expand(difference.as_numer_denom()[0]))):
        factor, rest = term.as_independent(*difference.free_symbols, as_Add=False)
        found[rest] = found.get(rest, 0) + factor
    return {term: factor for term, factor in found.items() if factor != 0}


def _size(part: Candidate) -> tuple[int, int]:
    """The largest number of terms of the expanded numerator and denominator. Raises OverflowError if these are many."""
    from sympy import Add, Mul, Pow

    sizes = [*map(_size, part.args)]
    above = below = 1
    if isinstance(part, Add):
        below = prod(each for _, each in sizes)
        above = sum(each * (below // rest) for each, rest in sizes)
    elif isinstance(part, Mul):
        above, below = (prod(each[place] for each in sizes) for place in (0, 1))
    elif isinstance(part, Pow) and part.exp.is_Rational:
        power = int(-(-abs(part.exp) // 1))
        above, below = (comb(each + power - 1, power) for each in (sizes[0] if part.exp > 0 else sizes[0][::-1]))
    _check(above * below, _TERMS)
    return above, below
