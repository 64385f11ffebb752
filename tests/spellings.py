"""Twenty ways to write an answer, changes that make it another answer, and strings that hurt a verifier.

Nothing here knows how the verifier works: spellings follow LaTeX, changes are checked by numbers where they can be.
"""

import math
import random
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


# another answer -----------------------------------------------------------------------------------------------------------


WORDS = ("another word", "letters in another order", "other unit")


def changed(answer, seed=0):
    """(what, text) of answers that differ from this one; each is checked by numbers if both have a value."""
    draw = random.Random(f"{seed} {answer}")
    found = []
    for what, text in _changes(bare(answer), draw):
        if text is not None and text != bare(answer) and (what in WORDS or really_different(bare(answer), text)):
            found.append((what, text))
    return found


def _changes(text, draw):
    spots = [spot for spot in NUMBER_INSIDE.finditer(text)]
    for what, spot in (("first number", spots[:1]), ("last number", spots[-1:])):
        for m in spot:
            yield what, text[: m.start()] + another(m[0], draw) + text[m.end() :]
    if NUMBER.fullmatch(text) or FRACTION.fullmatch(text):
        yield "sign", text[1:] if text.startswith("-") else f"-{text}"
        yield "a bit more", f"{text}+0.001"
    if WHOLE.fullmatch(text):
        yield "ten times", f"{text}0"
        yield "half more", f"{text}.5"
    if found := FRACTION.fullmatch(text):
        yield "reciprocal", f"\\frac{{{found[2]}}}{{{found[1]}}}"
    yield "swapped entries", swapped(text)
    yield "other interval end", other_end(text)
    yield "entry more", more(text)
    yield "another word", other_word(text)
    yield "letters in another order", reversed_letters(text)
    yield "other relation", flipped(text, (("\\le", "\\ge"), ("\\ge", "\\le"), ("<", ">"), (">", "<")))
    if "\\text" not in text:
        yield "other operator", re.sub(r"(?<=[\w)}])(\s*)([+-])", lambda m: m[1] + "+-"[m[2] == "+"], text, count=1)
    yield "other unit", other_unit(text)
    if not re.search(r"=|q|\\text|\\mbox", text):
        yield "other variable", re.sub(r"(?<![a-zA-Z\\{])[a-hj-z](?![a-zA-Z])", "q", text)


NUMBER_INSIDE = re.compile(r"\d+")


def another(digits, draw):
    """Another number of the same length."""
    while (other := str(int(digits) + draw.choice((1, 2, 3, -1)))) == digits or int(other) < 0:
        pass
    return other


def entries(text):
    """The entries of a bracket or list, commas inside brackets apart; None if it has but one."""
    parts, depth = [""], 0
    for token in re.findall(r"\\.|,\\!|.", text, re.DOTALL):
        depth += (token in "([{") - (token in ")]}")
        if token == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts] if len(parts) > 1 else None


def swapped(text):
    """(a, b) → (b, a) for ordered ones; not for intervals that end in infinity, which would be none."""
    inner = re.fullmatch(r"(\\left)?\(\s*(.*?)\s*(\\right)?\)", text, re.DOTALL)
    parts = entries(inner[2]) if inner and "cup" not in text and "infty" not in text else None
    return f"({', '.join(reversed(parts))})" if parts and parts != parts[::-1] else None


def other_end(text):
    inner = text.replace("\\left", "").replace("\\right", "")[1:-1]
    if re.fullmatch(r"(\\left)?\[.*[)\]]", text) and len(entries(inner) or ()) == 2:
        return re.sub(r"^(\\left)?\[", lambda m: (m[1] or "") + "(", text)
    if re.fullmatch(r"(\\left)?\(.*\]", text):
        return re.sub(r"\]$", ")", text)
    return None


def more(text):
    parts = entries(text) if not re.search(r"\d,\d{3}|,\\!|\{,\}|text|=", text) else None
    return f"{text}, 987" if parts and not text.startswith(("(", "[", "\\left")) else None


def other_word(text):
    found = re.fullmatch(r"\\text\{(\(?)([A-Za-z ]+)(\)?)\}", text)
    if not found:
        return None
    word = "Q" if len(found[2]) == 1 else "Zebra"
    return f"\\text{{{found[1]}{word}{found[3]}}}"


def reversed_letters(text):
    """Words and names of points; a product of variables is the same in any order."""
    found = re.fullmatch(r"(\\text\{)?([A-Za-z]{2,})(\})?", text)
    if not found or found[2] == found[2][::-1] or not (found[1] or len(found[2]) > 2):
        return None
    return (found[1] or "") + found[2][::-1] + (found[3] or "")


def other_unit(text):
    """cm for km and so on."""
    others = {"cm": "km", "inches": "feet", "feet": "inches", "p.m.": "a.m.", "cents": "dollars", "hours": "days",
              "miles": "yards"}  # fmt: skip
    found = re.search(r"\{ ?(" + "|".join(map(re.escape, others)) + r")\}", text)
    return text.replace(found[1], others[found[1]]) if found else None


def flipped(text, pairs):
    """The first sign that stands in it as its counterpart."""
    for sign, other in pairs:
        if sign in text:
            return text.replace(sign, other, 1)
    return None


def really_different(one, other):
    """False if both have the same value at three points; what has no value here counts as different."""
    values = [[value(text, seed) for text in (one, other)] for seed in range(3)]
    known = [pair for pair in values if None not in pair]
    return not known or any(abs(a - b) > 1e-9 * (1 + abs(a)) for a, b in known)


def value(text, seed):
    """A formula's value with its variables drawn at random, None if it is none; complex where it has an i."""
    text = re.sub(r"\\(?:left|right|displaystyle|!|,|;|quad)|\\[$%]|[\s$]|\^\{?\\circ\}?", "", text).replace("{,}", "")
    text = re.sub(r"\\(?:text|mbox)\{[^{}]*\}(\^\{?\d\}?)?", "", text)
    text = re.sub(r"^[a-zA-Z]=", "", text)
    text = re.sub(r"\\[dt]?frac(\d)(\d)", r"((\1)/(\2))", text)
    text = re.sub(r"\\sqrt(\d)", r"sqrt(\1)", text)
    for _ in range(4):
        text = re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
        text = re.sub(r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)", text)
        text = re.sub(r"\^\{([^{}]*)\}", r"**(\1)", text)
    text = re.sub(r"\^(\w)", r"**\1", text).replace("\\pi", "@").replace("\\cdot", "*").replace("sqrt", "#")
    if re.search(r"[\\{}=,_<>;:]|[a-zA-Z]{2}", text) and not re.fullmatch(r"[a-zA-Z0-9#@().+*/-]+", text):
        return None
    text = re.sub(r"(?<=[\w)@])(?=[a-zA-Z#@(])|(?<=[)a-zA-Z@])(?=\d)", "*", text).replace("#*(", "#(")
    draw = random.Random(seed)
    names = {letter: draw.uniform(1, 2) for letter in "abcdefghjklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"}
    try:
        code = compile(text.replace("#", "_root").replace("@", "_pi"), "answer", "eval")
        return complex(eval(code, {"__builtins__": {}}, {**names, "i": 1j, "_root": lambda x: x**0.5, "_pi": math.pi}))
    except (SyntaxError, NameError, TypeError, ArithmeticError, ValueError):
        return None


# what hurts ---------------------------------------------------------------------------------------------------------------


def hostile(count, seed=0):
    """`count` responses made to hang or fill a verifier: towers of powers, nesting, long runs, half a formula, noise."""
    draw = random.Random(seed)
    kinds = [_tower, _nested, _long, _bomb, _noise, _half, _many, _huge]
    return [kinds[number % len(kinds)](draw) for number in range(count)]


def _tower(draw):
    height = draw.randint(2, 8)
    digit = draw.choice("23579")
    sign = draw.choice(("", "-", "1/", "\\sqrt{", "\\frac{1}{"))
    return f"\\boxed{{{sign}{(digit + '^{') * height}{digit}{'}' * height}{'}' if sign.endswith('{') else ''}}}"


def _huge(draw):
    n = draw.choice((10**6, 10**9, 123456789, 10**12))
    return boxed(draw.choice((
        f"{n}!", f"\\binom{{{n}}}{{{n // 2}}}", f"{n}^{{{n}}}", f"\\sum_{{k=1}}^{{{n}}} k^{{{n}}}",
        f"\\int_0^{{{n}}} x^{{x^x}} dx", f"1e{n}", f"\\prod_{{k=1}}^{{{n}}} k", f"(x+y+z)^{{{n % 10007}}}", f"{n}^{{1/{n}}}",
        "9" * 5000, "0." + "3" * 50_000,
        f"\\sqrt[{n}]{{{n}}}", f"2^{{2^{{{n % 97}}}}}", f"\\gcd({n}!, {n}^{{{n}}})", f"F_{{{n}}}", f"\\log(\\log({n}^{{{n}}}))",
    )))  # fmt: skip


def _nested(draw):
    depth = draw.choice((10, 100, 1000, 5000))
    pairs = (("\\frac{1}{", "}"), ("\\sqrt{", "}"), ("(", ")"), ("\\left(", "\\right)"), ("{", "}"), ("|", "|"),
             ("\\boxed{", "}"))  # fmt: skip
    opening, closing = draw.choice(pairs)
    return boxed(opening * depth + "x" + closing * depth)


def _long(draw):
    unit = draw.choice(("1", "1+", "x", "\\pi ", "1,", "- ", "\\frac{1}{2}+", "a_", "2^", "1/", "\\cup(0,1)", "\\text{a}", "."))
    text = (unit * (100_000 // len(unit)))[:100_000]
    return draw.choice((text, f"\\boxed{{{text}}}", f"${text}$"))


def _bomb(draw):
    units = ("answer is ", "final answer is $", "$ ", "$$", "\\[", "\\(", "1 ,", "\\boxed{", "=", "\n", "and ", "1 000 ",
             "$1$ and ")  # fmt: skip
    unit = draw.choice(units)
    return (unit * (draw.choice((1_000, 20_000, 100_000)) // len(unit))) + draw.choice(("", "7", "$7$", "I hope"))


def _noise(draw):
    alphabet = "0123456789+-*/^_{}()[]\\$ ,.xyzabc=<>!|&%\n\ud83d\x00é∞√"
    return "".join(draw.choice(alphabet) for _ in range(draw.choice((20, 200, 2_000))))


def _half(draw):
    parts = [
        "\\frac", "{", "}", "1", "\\sqrt", "^", "_", "x", "\\left(", "\\right)", "\\begin{pmatrix}", "\\end{pmatrix}", "&",
        "\\\\", ",", "\\int", "\\sum_{k=1}^{9}", "=", "\\le", "\\infty", "\\text{", "\\%", "!", "\\cup", "[", ")", "\\sin",
        "\\log_", "|", "\\pm",
    ]  # fmt: skip
    return boxed("".join(draw.choice(parts) for _ in range(draw.choice((5, 20, 60)))))


def _many(draw):
    size = draw.choice((50, 500, 5_000))
    return draw.choice((
        f"\\boxed{{{', '.join(str(draw.randrange(10**6)) for _ in range(size))}}}",
        f"\\boxed{{{' + '.join(f'x_{{{k}}}^{{{draw.randrange(99)}}}' for k in range(size))}}}",
        f"\\boxed{{\\begin{{pmatrix}} {' & '.join(str(k) for k in range(size))} \\end{{pmatrix}}}}",
        f"\\boxed{{{' = '.join(str(draw.randrange(99)) for _ in range(size))}}}",
        f"\\boxed{{{''.join(f'(x-{k})' for k in range(size))}}}",
    ))  # fmt: skip
