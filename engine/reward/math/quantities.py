"""Reads numbers with units: decimals, fractions and mixed numbers, per cent signs, and words such as million."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from math import prod
from typing import NamedTuple

from engine.reward.math.formulas import LONGEST

_TEXT = r"\\text\{[^{}]*\}(?:\^(?:\{-?\d\}|\d))?"
_UNIT = re.compile(rf"(?<=[\d}})%a-zA-Z])((?:(?:/|\\cdot)?{_TEXT})+|\^\\circ(?:(?:\\text\{{)?[CF]\}}?)?)\.?$")
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_CURRENCY = re.compile(r"^([+-]?)(?:\\\$|([€£¥]))(?=.)([+-]?)")
_CURRENCIES = {"": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen"}
_NAMES = """mm millimeter millimetre 毫米, cm centimeter centimetre 厘米, dm decimeter decimetre 分米, m meter metre 米,
km kilometer kilometre 千米 公里, in inch inche, ft foot feet, yd yard, mi mile, mg milligram 毫克, g gram 克,
kg kilogram 千克 公斤, jin 斤, ton tonne 吨, lb pound, oz ounce, s sec second 秒, min minute 分钟, h hr hour 小时,
day 天, week 周 星期, month 个月, year 年, cent, dollar 美元, yen yuan 元, jiao 角, euro 欧元, am, pm, gallon,
liter litre 升, ml milliliter millilitre 毫升, radian rad, C, F"""
_KNOWN = {name: names.split()[0] for names in _NAMES.split(",") for name in names.split()}
_CHINESE = {"平方": " square ", "立方": " cubic ", "每": "/", "个小时": "小时", "个星期": "星期"}
_UNSURE = re.compile(
    "[一二三四五六七八九十百千万亿兆两半多余以上下内外左右约成折之的根不少或且和负正大小于至比方]"
    "(?<!千(?=[克米瓦卡焦帕伏牛赫]))"
)
"""Characters of words that do not only name what is counted, unless the word is a known unit: 5多 is not 5."""
_COUNTED = re.compile(
    "(?:[个种名位条只张本件块组对双棵把道间层辆台支枚颗头匹座套人]|根(?!号)|次(?!方|幂))"
    "(?![一二三四五六七八九十百千万亿兆两内外](?![角边面])|[多之])(?!.*(?:[半余以约或且和不少至比负]|左右|上下))"
)
"""A measure word and what it counts: 5种方法 is 5, and neither 5个半 nor 5个以上 is."""
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}
_SPEEDS = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h"}
_MEANING = re.compile(
    r"\b(?:and|or|not|iff?|when|for|where|mod(?:ulo)?|base|more|less|fewer|greater|smaller|most|least|above|below|over"
    r"|under|times|plus|minus|by|to|than|factorial|choose|root|half|negative|positive|other|except|only|until|from"
    r"|without|with|is|are|terms|(?:dozen|hundred|thousand|[mbtr]+illion)s?|(?:ten|hundred|thousand|four|fif)ths?|halves|thirds?)\b",
    re.IGNORECASE,
)
"""Words that do not only name what is counted: `5\\text{ or more}` is not 5."""
_SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_CHINESE_SCALES = {"百": 10**2, "千": 10**3, "万": 10**4, "亿": 10**8}
_SCALE = f"(?:(?:(?:{'|'.join(_SCALES)})s?(?![a-z])|百(?!分)|千(?![克米瓦卡焦帕伏牛赫])|[万亿]) ?)+"
_SCALES |= _CHINESE_SCALES
_SCALED = re.compile(rf"([^=,;]*?(?:[\d}}]|[a-z](?=\\text)))(\\text\{{)?({_SCALE})(?:of )?([^=,;]*)")
_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_TEN = r"10\^(?:\{([+-]?\d{1,4})\}|(\d))"
_NUMBER = re.compile(
    rf"\$?([+-]?)\$?(?:(?:({_DECIMAL})(?:E([+-]?\d{{1,4}})|\\cdot ?{_TEN})?|{_TEN})"
    r"|\\frac\{(-?\d+)\}\{(-?\d+)\}|(\d+)/(\d+)|\((-?\d+)\)/\(?(\d+)\)?)(%?)"
)
_MIXED = re.compile(r"([+-]?)(\d+)\\frac\{(\d+)\}\{(\d+)\}(%?)")
_REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)(?:\\(?:overline|bar|dot) ?(?:\{(\d+)\}|(\d))|\((\d+)\))(%?)")


class Number(NamedTuple):
    """The value of an answer that is one number."""

    value: Fraction
    percent: bool
    """Whether a per cent sign follows; `value` is the number before it."""
    rounded: bool
    """Whether it is a decimal, which may stand for a number with more digits."""


class Quantity(NamedTuple):
    """An answer split into parts."""

    bare: str
    """The text without number words and unit."""
    scale: int
    """The product of number words such as million."""
    unit: dict[str, int] | None
    """Powers of the units by name, "" for unknown ones (ways, apples); None without a unit."""


def read_number(text: str) -> Number | None:
    r"""The value of a text that is one decimal, fraction or mixed number; None for any other text.

    A unit is ignored, but a number word in its place counts: 5\text{ million dollars} is 5000000.
    """
    if len(text) > LONGEST:
        return None
    bare, scale, _ = read_quantity(text)
    found = _plain(bare.replace("\\$", "$"))
    return found and found._replace(value=found.value * scale)


def read_quantity(text: str) -> Quantity:
    r"""The text without its number words and its unit, followed by these two. For example, 5\text{ million euros} gives
    5, 1000000 and {"euro": 1}."""
    bare, scale = _scaled(text)
    money = _CURRENCY.match(bare)
    if money:
        bare = f"{money[1] or money[3]}{bare[money.end() :]}"
    match = _UNIT.search(bare)
    unit = _unit(match[1], bare[: match.start()]) if match else None
    if match and unit is not None:
        bare = bare[: match.start()]
    if money and (unit is None or not any(unit)):
        unit = {_CURRENCIES[money[2] or ""]: 1}
    return Quantity(bare, scale, unit)


def units_differ(one: dict[str, int] | None, other: dict[str, int] | None) -> bool:
    """Whether both have units and these differ. A unit may be left out, and an unknown one may stand for any unit of
    the same powers."""
    if one is None or other is None:
        return False
    if sorted(one.values()) != sorted(other.values()):
        return True
    return "" not in one and "" not in other and one != other


def _scaled(text: str) -> tuple[str, int]:
    """The text without number words such as million, and the product of these."""
    if len(text) > LONGEST or (match := _SCALED.fullmatch(text)) is None:
        return text, 1
    bare, inside, words, rest = match.groups()
    scale = prod(_SCALES[word] for word in re.findall("|".join(_SCALES), words))
    return bare + ("" if inside and rest == "}" else f"{inside or ''}{rest}"), scale


def _unit(text: str, before: str) -> dict[str, int] | None:
    r"""Powers of the units in texts such as \text{ cm}^2; None if they cannot be units of the text before.

    An unknown word names what is counted, and only a number can be counted.
    """
    if text.startswith("^\\circ"):
        return None if _ANGLE.search(before) else {letter: 1 for letter in re.findall("[CF]", text)} or {"": 1}
    plain = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).replace("\\cdot", " ").replace("{", "").replace("}", "")
    for short, long in _SPEEDS.items():
        plain = re.sub(rf"\b{short}\b", long, plain)
    for typed, word in _CHINESE.items():
        plain = plain.replace(typed, word)
    words = re.findall(r"/|\^-?\d|[^\s/^]+", re.sub(r"\bper\b", "/", plain.replace(".", "")))
    if any(_UNSURE.search(word) and word not in _KNOWN and not _COUNTED.match(word) for word in words):
        return None
    if _MEANING.search(plain) or (words and words[0] in ("squared", "cubed")):
        return None
    powers = _powers(words)
    counts = re.search(r"\d|\\pi", before) or (before and "" not in powers)
    return powers if counts and any(map(str.isalpha, plain)) else None


def _powers(words: list[str]) -> dict[str, int]:
    powers: Counter[str] = Counter()
    sign = 1
    power = 1
    last = ""
    for word in words:
        lower = word.casefold()
        if word == "/":
            sign = -1
        elif word[0] == "^" or lower in ("squared", "cubed"):
            powers[last] = powers[last] * int(word[1:] if word[0] == "^" else _POWERS[lower])
        elif lower in _POWERS:
            power = _POWERS[lower]
        elif lower == "of":
            break
        else:
            last = _KNOWN.get(word) or _KNOWN.get(lower) or _KNOWN.get(lower.removesuffix("s"), "")
            powers[last] = sign * power if not last else powers[last] + sign * power
            sign = 1
            power = 1
    return dict(powers)


def _plain(bare: str) -> Number | None:
    """Like `read_number`, for a text without a unit."""
    if mixed := _MIXED.fullmatch(bare):
        sign, whole, above, below, percent = mixed.groups()
        return _signed(sign, int(whole) + Fraction(int(above), int(below)), percent) if int(below) else None
    if repeating := _REPEATING.fullmatch(bare):
        sign, whole, start, first, second, third, percent = repeating.groups()
        period = first or second or third
        scale = 10 ** len(start)
        value = Fraction(int((whole + start) or 0), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
        return _signed(sign, value, percent)
    match = _NUMBER.fullmatch(bare)
    if match is None:
        return None
    sign, decimal, *powers, above, below, over, under, top, bottom, percent = match.groups()
    if decimal is not None or any(powers):
        decimal = decimal or "1"
        power = Fraction(10) ** int(next(filter(None, powers), 0))
        return _signed(sign, Fraction(decimal.rstrip(".")) * power, percent, rounded="." in decimal)
    denominator = int(below or under or bottom)
    return _signed(sign, Fraction(int(above or over or top), denominator), percent) if denominator else None


def _signed(sign: str, value: Fraction, percent: str = "", rounded: bool = False) -> Number:
    return Number(-value if sign == "-" else value, bool(percent), rounded)
