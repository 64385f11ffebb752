"""Reads answers that are one number: decimals, fractions and mixed numbers, with units, per cent signs and words such
as million."""

from __future__ import annotations

import re
from fractions import Fraction
from math import prod

from engine.reward.formulas import LONGEST

_UNIT = re.compile(r"(?<=[\d}%ia-z])(?:\\text\{[^{}]*\}(?:\^\{?[23]\}?)?|\^\\circ(?:\s*[CF])?)\.?$")
_SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = f"(?:(?:{'|'.join(_SCALES)})s?(?![a-z]) ?)+"
_SCALED = re.compile(rf"([^=,;]*?(?:[\d}}]|[a-z](?=\\text)))(\\text\{{)?({_SCALE})(?:of )?([^=,;]*)")
_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"\$?([+-]?)\$?(?:({_DECIMAL})|\\frac\{{(-?\d+)\}}\{{(-?\d+)\}}|(\d+)/(\d+)|\((-?\d+)\)/\(?(\d+)\)?)(%?)"
)
_MIXED = re.compile(r"([+-]?)(\d+)\\frac\{(\d+)\}\{(\d+)\}")


def number(text: str) -> tuple[Fraction, bool] | None:
    r"""The value of a text that is one decimal, fraction or mixed number, and whether a per cent sign follows; None for
    any other text.

    A unit is ignored, but a number word in its place counts: 5\text{ million dollars} is 5000000.
    """
    text, scale = scaled(text) if len(text) <= LONGEST else ("", 1)
    found = _plain(_UNIT.sub("", text.replace("\\$", "$")))
    return None if found is None else (found[0] * scale, found[1])


def scaled(text: str) -> tuple[str, int]:
    r"""The text without number words such as million, and their factor:
    5\text{ million euros} → 5\text{euros}, 1000000."""
    if len(text) > LONGEST or (match := _SCALED.fullmatch(text)) is None:
        return text, 1
    bare, inside, words, rest = match.groups()
    scale = prod(_SCALES[word] for word in re.findall("|".join(_SCALES), words))
    return bare + ("" if inside and rest == "}" else f"{inside or ''}{rest}"), scale


def _plain(bare: str) -> tuple[Fraction, bool] | None:
    """Like `number`, for a text without a unit."""
    if mixed := _MIXED.fullmatch(bare):
        sign, whole, above, below = mixed.groups()
        return _signed(sign, int(whole) + Fraction(int(above), int(below))) if int(below) else None
    match = _NUMBER.fullmatch(bare)
    if match is None:
        return None
    sign, decimal, above, below, over, under, top, bottom, percent = match.groups()
    if decimal is not None:
        value = Fraction(decimal.rstrip("."))
    else:
        denominator = int(below or under or bottom)
        if not denominator:
            return None
        value = Fraction(int(above or over or top), denominator)
    return (-value if sign == "-" else value), bool(percent)


def _signed(sign: str, value: Fraction) -> tuple[Fraction, bool]:
    return (-value if sign == "-" else value), False
