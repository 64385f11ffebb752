"""Reads numbers and their units: decimals, fractions and mixed numbers, per cent signs, and words such as million."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from engine.reward.math.formulas import ANGLE, LONGEST

_UNIT = re.compile(
    r"(?:(?:(?:/|\\cdot)?\\text\{[^{}]*\}(?:\^(?:\{-?\d\}|\d))?)+|\^\\circ ?(?:(?:\\text\{)?[CF]\}?)?|%)$"
)
_CURRENCY = re.compile(r"([+-]?)(?:\\?([$€£¥]))+(?=.)")
_NAMES = """mm millimeter millimetre 毫米, cm centimeter centimetre 厘米, dm decimeter decimetre 分米, m meter metre 米,
km kilometer kilometre 千米 公里, in inch inche, ft foot feet, yd yard, mi mile, mg milligram 毫克, g gram 克, kg
kilogram 千克 公斤, jin 斤, ton tonne 吨, lb pound, oz ounce, s sec second 秒, min minute 分钟, h hr hour 小时 时
个小时, mi/h mph, km/h kph, day 天, week 周 星期, month 个月, year 年, decade, cent, dollar $ USD 美元, yen yuan ¥ 元,
jiao 角, euro €, £, am, pm, gallon, quart, pint, acre, liter litre 升, ml milliliter millilitre 毫升, degree 度, radian
rad, C, F, unit"""
_KNOWN = {name: names.split()[0] for names in _NAMES.split(",") for name in names.split()}
_SPELLED = {r"平方": " square ", r"立方": " cubic ", r"每|\bper\b": "/", r" squared": "^2", r" cubed": "^3"}
_SPELLED |= {r"\b(?:square |sq) *(\w+)": r"\1^2", r"\b(?:cubic|cu) *(\w+)": r"\1^3"}
_COUNTED = re.compile(
    r"(?:(?:distinct|different|possible|positive|real|right|ordered|total) )?"
    r"(?!\w*(?:ths|thirds|halves|quarters|scores|times|(?:hundred|thousand|illion|dozen|lakh|crore|factorial|reciprocal"
    r"|inverse|fail|percent|term|exclude|gros|les|\b(?:one|two|three|four|five|sixe|seven|eight|nine|ten|pair|couple|trio"
    r"|negative|square|cube|power|digit|log|zero|multiple|equal|exceed|divide))s)$)[a-z]+[^suix\W]s|people|(?:wo)?men|children"
    r"|[个种名位条只张本件块组根次棵][^一二三四五六七八九十百千万亿两半多余以上下内外左右约成的根不少或且和号大于至比负]{0,4}(?<![次平]方)"
)
"""What is counted: a noun in the plural, or a Chinese measure word. No part (7 eighths), scale, number or judgement."""
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALES |= {"百": 100, "千": 10**3, "万": 10**4, "亿": 10**8}
_SCALE = re.compile(rf"({'|'.join(_SCALES)})s?(?![a-z克米]) ?(?:of )?")
_TEN = r"10\^(?:\{([+-]?\d{1,3})\}|(\d))"
_NUMBER = re.compile(
    rf"([+-]?)(?:(?:(\d+(?:\.\d*)?|\.\d+)(?:E([+-]?\d{{1,3}})|\\cdot ?{_TEN})?|{_TEN})"
    r"|(\d*)\\frac\{(-?\d+)\}\{(\d+)\}|\(?(-?\d+)\)?/\(?(\d+)\)?)"
)
_REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)(?:\\(?:overline|bar|dot) ?(?:\{(\d+)\}|(\d))|\((\d+)\))")


class Quantity(NamedTuple):
    """An answer that may be a number with a unit."""

    text: str
    """Without number words and unit; of a number that is no decimal, its value."""
    value: Fraction | None
    """None if it isn't a number."""
    unit: str


def read_quantity(text: str) -> Quantity | None:
    r"""Reads 5\text{ million euros} as 5000000, "euro". None if the words at the end aren't known to be a unit or the
    name of what is counted: they may say anything."""
    text = f"\\${text[:-2]}" if text.endswith("\\$") else text
    money = _CURRENCY.match(text)
    bare = f"{money[1]}{text[money.end() :]}" if money else text
    match = _UNIT.search(bare)
    if match and match[0].startswith("^") and ANGLE.search(bare):
        match = None
    bare = bare[: match.start()] if match else bare
    words = re.sub(r"\\text|\\cdot|[{}]", " ", (match[0] if match else "").replace(".", ""))
    words = re.sub(r"\^\\circ *", "", words) or "degree" if "circ" in words else " ".join(words.split())
    scale = 1
    while found := _SCALE.match(words):
        scale *= _SCALES[found[1]]
        words = words[found.end() :]
    unit = words if words in ("", "%") else _unit(words)
    value = read_number(bare)
    if unit is None or (unit and not re.search(r"\d|\\pi", bare)) or (scale > 1 and value is None):
        return None
    if money and unit in ("", _KNOWN[money[2]]):
        unit = _KNOWN[money[2]]
    elif money and not _COUNTED.fullmatch(unit):  # before what is counted, $ begins a formula
        return None
    if value is None:
        return Quantity(bare, None, unit)
    return Quantity(
        bare if scale == 1 and re.fullmatch(r"[+-]?[\d.]+", bare) else str(value * scale), value * scale, unit
    )


def _unit(stated: str) -> str | None:
    """One spelling of km/h, square feet or apples; None if they are not known to be units."""
    words = stated
    for typed, spelled in _SPELLED.items():
        words = re.sub(typed, spelled, words)
    names = {
        word: _KNOWN.get(word) or _KNOWN.get(word.lower().removesuffix("s")) for word in re.findall(r"[^\W\d_]+", words)
    }
    if None in names.values():
        return stated if _COUNTED.fullmatch(stated) else None
    return re.sub(r"[^\W\d_]+", lambda found: names[found[0]] or "", words).replace(" ", "")


def read_number(text: str) -> Fraction | None:
    """The value of a text that is one decimal, fraction or mixed number; None for any other text."""
    if found := _REPEATING.fullmatch(text):
        sign, whole, start, *periods = found.groups()
        period = next(filter(None, periods))
        scale = 10 ** len(start)
        value = Fraction(int((whole + start) or 0), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
        return -value if sign == "-" else value
    if len(text) > LONGEST or not (found := _NUMBER.fullmatch(text)):
        return None
    sign, decimal, *powers, whole, above, below, over, under = found.groups()
    if (whole and int(above) < 0) or (denominator := int(below or under or 1)) == 0:
        return None
    if decimal or any(powers):
        value = Fraction((decimal or "1").rstrip(".")) * Fraction(10) ** int(next(filter(None, powers), 0))
    else:
        value = Fraction(int(above or over), denominator) + int(whole or 0)
    return -value if sign == "-" else value
