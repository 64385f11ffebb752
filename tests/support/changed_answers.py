"""Changes that make an answer another one. Nothing here knows how the verifier works:
numbers check them where they can."""

import math
import random
import re

from support.spellings import FRACTION, NUMBER, WHOLE, bare

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
    parts = [""]
    depth = 0
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
    others = {
        "cm": "km",
        "inches": "feet",
        "feet": "inches",
        "p.m.": "a.m.",
        "cents": "dollars",
        "hours": "days",
        "miles": "yards",
    }
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
