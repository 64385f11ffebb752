"""Twenty ways to write an answer. Nothing here knows how the verifier works: spellings follow LaTeX."""

import re
from fractions import Fraction

WHOLE = re.compile(r"-?\d+")
NUMBER = re.compile(r"(?<![\w.\\}])-?(?:\d+\.\d+|\.\d+|\d+)(?![\w.])")
FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
SIMPLE_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
GROUPS = r"(\d)(?=(?:\d{3})+$)"


def bare(answer):
    """As people would state it: what tests of the project have always accepted as wrapping goes first."""
    text = answer.strip().rstrip(".").strip()
    if text.startswith("$") and text.endswith("$") and text.count("$") == 2:
        text = text[1:-1].strip()
    return text


def scaled(text):
    r"""Delimiters that grow; half-open intervals and tuples alike."""
    if "\\left" in text:
        return text.replace("\\left", "").replace("\\right", "")
    if re.fullmatch(r"[(\[].*[)\]]", text) and "cup" not in text:
        return f"\\left{text[:-1]}\\right{text[-1]}"
    return text


def grouped(text, mark):
    """Thousands: 1234 → 1{mark}234 in a lone whole number."""
    return re.sub(GROUPS, lambda m: m[1] + mark, text) if WHOLE.fullmatch(text) and abs(int(text)) >= 1000 else text


def decimal(text):
    """5 → 5.0; 3/4 → 0.75 where the decimal ends; 0.75 → 3/4."""
    if WHOLE.fullmatch(text):
        return f"{int(text)}.0"
    found = SIMPLE_FRACTION.fullmatch(text)
    if found:
        value = Fraction(int(found[2]), int(found[3])) * (-1 if found[1] else 1)
        shown = f"{float(value):.6f}".rstrip("0")
        return shown if Fraction(shown) == value else text
    if re.fullmatch(r"-?\d*\.\d{1,4}", text):
        value = Fraction(text)
        return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    return text


def slashed(text):
    """One fraction of whole numbers as 3/4."""
    found = SIMPLE_FRACTION.fullmatch(text)
    return f"{found[1]}{found[2]}/{found[3]}" if found else text


def minus_inside(text):
    """-a/b ↔ (-a)/b."""
    if re.fullmatch(r"-\\[dt]?frac\{\d+\}\{\d+\}", text):
        return re.sub(r"-(\\[dt]?frac)\{", r"\1{-", text)
    return re.sub(r"(\\[dt]?frac)\{-(?=\d+\}\{\d+\}$)", r"-\1{", text) if SIMPLE_FRACTION.fullmatch(text) else text


def terse(text):
    r"""\frac{1}{2} → \frac12, \sqrt{3} → \sqrt3, x^{2} → x^2."""
    text = re.sub(r"(\\[dt]?frac)\{(\d)\}\{(\d)\}", r"\1\2\3", text)
    text = re.sub(r"\\sqrt\{(\d)\}(?!\d)", r"\\sqrt\1", text)
    return re.sub(r"([\^_])\{(\w)\}(?!\w)", r"\1\2", text)


def verbose(text):
    r"""\frac12 → \frac{1}{2}, \sqrt3 → \sqrt{3}, x^2 → x^{2}."""
    text = re.sub(r"(\\[dt]?frac)\s*(\d)\s*(\d)", r"\1{\2}{\3}", text)
    text = re.sub(r"\\sqrt\s*(\d)(?!\d)", r"\\sqrt{\1}", text)
    return re.sub(r"([\^_])(\w)(?!\w)", r"\1{\2}", text)


def named(text):
    """x = 5 for a lone number or root."""
    return f"x = {text}" if "=" not in text and NUMBER.fullmatch(text) or FRACTION.fullmatch(text) else text


def with_unit(text):
    """A unit behind a lone number that has none."""
    return f"{text}\\text{{ units}}" if NUMBER.fullmatch(text) or FRACTION.fullmatch(text) else text


def without_unit(text):
    behind_number = re.sub(r"(?<=\d)\s*\\(?:text|mbox|textnormal)\{[^{}]*\}(?:\^\{?\d\}?)?$", "", text)
    return re.sub(r"(?<=\})\s*\\(?:text|mbox)\{ [^{}]*\}$", "", behind_number)


def unit(text):
    """Without its unit, or with one if it has none."""
    without = without_unit(text)
    return without if without != text else with_unit(text)


def spaced(text):
    """Blanks around operators and after commas, outside words."""
    if "\\text" in text or "\\mbox" in text:
        return text
    text = re.sub(r"(?<=[\w)}])\s*([+=-])\s*(?=[\w(\\])", r" \1 ", text)
    return re.sub(r",(?!\s*\\!|\d|\})\s*", ", ", text)


def dense(text):
    """No blank that LaTeX does not need; 81, 256 without its blank would be a number."""
    if "\\text" in text or "\\mbox" in text or re.search(r"\d, \d{3}", text):
        return text
    return re.sub(r"(?<!\\)\s+(?=[^a-zA-Z])|(?<=[^a-zA-Z\\])\s+", "", text)


def dotted(text):
    r"""2\sqrt{3} → 2 \cdot \sqrt{3}."""
    return re.sub(r"(?<![\w.{}\\])(\d+) ?(?=\\sqrt\{\d+\}|\\pi)", r"\1 \\cdot ", text)


def plain_symbols(text):
    """Degree, per cent and dollar signs as they are typed outside formulas."""
    text = re.sub(r"\s*\^\{?\\circ\}?", "°", text) if re.fullmatch(r"-?[\d.]+\^\{?\\circ\}?", text) else text
    return text.replace("\\%", "%").replace("\\$", "$") if re.fullmatch(r"\\?\$? ?[\d.,]+ ?(\\%)?", text) else text


def text_words(text):
    r"""\text{Evelyn} ↔ Evelyn, \mbox ↔ \text."""
    found = re.fullmatch(r"\\(?:text|mbox)\{([A-Za-z ]+)\}", text)
    return found[1] if found else text.replace("\\mbox", "\\text")


def boxed(text):
    return f"\\boxed{{{text}}}"


def with_fractions(text, command):
    return re.sub(r"\\[dt]?frac", lambda m: command, text)


SPELLINGS = {
    "boxed": lambda a: f"So the answer is {boxed(a)}",
    "boxed in dollars": lambda a: f"Therefore ${boxed(a)}$.",
    "boxed on a line": lambda a: f"Thus\n\\[\n{boxed(a)}\n\\]\n",
    "dollars inside": lambda a: boxed(f"${a}$"),
    "blanks inside": lambda a: boxed(f" {a} "),
    "full stop inside": lambda a: boxed(f"{a}."),
    "display style": lambda a: boxed(f"\\displaystyle {a}"),
    "not boxed": lambda a: f"After some work, the final answer is ${a}$.",
    "not boxed, display": lambda a: f"The final answer is\n\\[{a}\\]",
    "growing delimiters": lambda a: boxed(scaled(a)),
    "dfrac": lambda a: boxed(with_fractions(a, "\\dfrac")),
    "tfrac, slash": lambda a: boxed(slashed(with_fractions(a, "\\tfrac"))),
    "terse": lambda a: boxed(terse(a)),
    "verbose": lambda a: boxed(verbose(a)),
    "spaced": lambda a: boxed(dotted(spaced(a))),
    "dense": lambda a: boxed(dense(a)),
    "decimal": lambda a: boxed(decimal(a)),
    "thousands": lambda a: boxed(grouped(a, ",")),
    "named": lambda a: boxed(named(minus_inside(a))),
    "units, words, signs": lambda a: boxed(plain_symbols(text_words(unit(a)))),
}
"""Name → the whole response that states an answer so."""
