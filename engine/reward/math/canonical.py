r"""Rewrites an answer to one spelling: typed characters as LaTeX, one command for several equivalent ones, no layout,
units as `\text`."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from itertools import accumulate

from engine.reward.math.answers import strip_delimiters
from engine.reward.math.structure import is_closed, split_parts

_SIZES = (
    r"left|right|middle|[bB]igg?[lrm]?|(?:display|text|script|scriptscript)style|(?:no)?limits|q?quad|rm|bf|it|sf|tt|sl|sc"
    r"|tiny|scriptsize|footnotesize|small|normalsize|[lL]arge|LARGE|[hH]uge|en(?:space|skip)|(?:neg)?(?:thin|med|thick)space"
    r"|(?:math)?strut|h?fill|noindent|newline|par"
)
_SOFT = re.compile(
    rf"\\(?:{_SIZES})(?![a-zA-Z])\s*|(?<!\\)\\[!,;:> /]|~"
    r"|\\(?:[hv]space\*?|[hv]?phantom|color|label|tag)\s*\{[^{}]*\}"
    r"|\\(?:textcolor\s*\{[^{}]*\}|underline|uline|boxed|fbox|framebox)\s*(?=\{)"
)
"""Commands that only space, size, colour or frame what they stand before."""
_STARTS = re.compile(
    r"(?:\s|=|≈|\\(?:approx|Rightarrow|implies|therefore|to)(?![a-zA-Z])"
    r"|\\text\s*\{[^{}]*\b[aA]nswer(?: is)?\s*:?\s*\})+"
)
_ENDS = re.compile(r"(?:\\(?:[,;:!\\\s]|text\s*\{[\s.,;:]*\}|$)|[.,;\s])+$")
"""What may stand around an answer without being part of it."""
_STRONG = re.compile(r"\*\*([^*]+)\*\*")
_ORDINAL = re.compile(r"(\d+)\s*(?:\^\s*\{?)?(?:\\(?:text|mathrm)\s*\{)?\s*(?:st|nd|rd|th)\s*\}{0,2}")
_CHOICE = re.compile(r"(?:\\text\s*\{)?\s*(?:[oO]ption|[cC]hoice)\s+\(?([A-Z])\)?\s*\}?")
_NO_SOLUTION = re.compile(
    r"(?:\\text\s*\{)?\s*(?:there (?:is|are) )?no (?:real )?solutions?\s*\}?|(?:无解)", re.IGNORECASE
)
_TYPED_ROOT = re.compile(r"(?<![a-zA-Z\\])sqrt\s*\(([^()]*)\)")
_SYSTEM = re.compile(r"\\begin\{(cases|array|aligned)\}(?:\{[lcr]\})?([^&]*)\\end\{\1\}")
"""Equations below each other."""
_TEXT = re.compile(r"\\(?:[mh]box|emph|text(?:normal|rm|bf|it|sf|tt|sc|sl|up|md))(?=\s*\{)")
_NESTED = re.compile(r"(\\text\s*\{[^{}]*)\\text\s*\{([^{}]*)\}")
_FONT = re.compile(
    r"\\(?:mathrm|mathbf|mathit|mathsf|mathnormal|operatorname|boldsymbol|bm)\*?\s*"
    r"(?:\{((?:[^{}]|\{[^{}]*\})*)\}|([a-zA-Z])(?![a-zA-Z]))"
)
_OLD_FONT = re.compile(r"\{\s*\\(?:rm|bf|it|sf)(?![a-zA-Z])\s*([^{}]*)\}")
_CONSTANT = re.compile(r"\\text\s*\{\s*(e|i|\\?pi|\\imath)\s*\}|\\(?:imath|mathbbm?\{i\})(?![a-zA-Z])")
_PI = re.compile(r"(?<![a-zA-Z\\])(pi|infinity)(?![a-zA-Z])")
_TEXT_NUMBER = re.compile(r"\\text\s*\{\s*([-+]?[\d.,]*\d)\s*([^{}\d]*)\}")
_PER_CENT = re.compile(r"\s*\\text\s*\{\s*per ?cent\s*\}|(?<=[\d}])\s*per ?cent$")
_TYPED_AND = re.compile(r"(?<![a-zA-Z\\])(and|or)(?![a-zA-Z]|[^{}]*\})")
_DOTS = re.compile(r"\\(?:[lc]dots|dots[cbim]?)(?![a-zA-Z])|\.\.\.+")
_REPLACED = {
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\cfrac": "\\frac",
    "\\dbinom": "\\binom",
    "\\tbinom": "\\binom",
    "\\leq": "\\le",
    "\\geq": "\\ge",
    "\\leqslant": "\\le",
    "\\geqslant": "\\ge",
    "<=": "\\le ",
    ">=": "\\ge ",
    "\\lt": "<",
    "\\gt": ">",
    "\\neq": "\\ne",
    "!=": "\\ne ",
    "\\times": "\\cdot",
    "\\degree": "^\\circ",
    "\\degrees": "^\\circ",
    "\\lg": "\\log_{10}",
    "\\log_e": "\\ln",
    "\\backslash": "\\setminus",
    "\\varnothing": "\\emptyset",
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
    "\\lvert": "|",
    "\\rvert": "|",
    "\\vert": "|",
    "\\%": "%",
    "^{\\circ}": "^\\circ",
    "{,}": ",",
    "**": "^",
}
_KEYS = (re.escape(key) + ("(?![a-zA-Z])" if key[-1].isascii() and key[-1].isalpha() else "") for key in _REPLACED)
_REPLACE = re.compile("|".join(_KEYS))
_SIGNS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "—": "-",
        "‐": "-",
        "‑": "-",
        "×": "\\times ",
        "·": "\\cdot ",
        "⋅": "\\cdot ",
        "÷": "\\div ",
        "±": "\\pm ",
        "∓": "\\mp ",
        "∞": "\\infty ",
        "∪": "\\cup ",
        "∩": "\\cap ",
        "∈": "\\in ",
        "∅": "\\emptyset ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "≠": "\\ne ",
        "≈": "\\approx ",
        "∠": "\\angle ",
        "°": "^\\circ ",
        "∶": ":",
        "⁄": "/",
        "、": ",",
        "。": ".",
        "…": "\\dots ",
        "⋯": "\\dots ",
        "′": "'",
    }
)
_EARLY = re.compile(r"(?P<up>[⁰¹²³⁴-⁹⁺⁻ⁿ]+)|(?P<down>[₀-₉₊₋]+)|(?P<part>[¼-¾⅐-⅞])|(?P<set>[ℕℤℚℝℂ])|(?P<circle>º)")
_ROOT = re.compile(r"([√∛∜])\s*(?:\{([^{}]*)\}|\(([^()]*)\)|(\d+(?:\.\d+)?|[a-zA-Z]|\\[a-zA-Z]+))")
_INDEX = {"√": "", "∛": "[3]", "∜": "[4]"}
_IDEOGRAPHS = re.compile(
    r"(?<=[\d}%)])\s*([\u4e00-\u9fff]+(?:/[\u4e00-\u9fff]+)?)(?=\s*(?:$|[,;]|\\text\s*\{\s*(?:and|or)))"
)
_JOINED = re.compile(
    r"\\text\s*\{\s*(或者?|并?且|和)\s*\}|(?<![\u4e00-\u9fff])(或者?|并?且|和)(?![\u4e00-\u9fff])|(或者?)(?=\s*[-+.\d])"
)
"""A word between two formulas, not inside other words. After a unit 或 joins two numbers, while 和 may be a sum."""
_CONJUNCTIONS = {"或": "or", "且": "and", "并": "and", "和": "and"}
GAP = "␣"
"""Stands between two numbers with a blank between them. Such a text is no formula: 5 6 is neither 56 nor 30."""
_TAKES = r"[\^_]\s*-?|\\(?:[dtc]?frac|sqrt|[dt]?binom)\s*"
"""What takes the digits before a blank as its own."""
_SPACED_NUMBERS = re.compile(rf"({_TAKES})?(?<![\d.,])(\.?\d[\d.]*(?: +\d[\d.]*)+)(?:(?= */ *(\d+)(?! *\d))|(?!\d))")
"""Numbers with blanks between them, and the denominator after the last one."""
_GROUPS = re.compile(r"\d{1,3}(?: \d{3})+(?:\.\d+)?|(?:\d{1,3}(?: \d{3})*)?\.\d{3}(?: \d{3})*(?: \d{1,3})?")
"""One number whose digits blanks part by threes."""
_SPACED_MIXED = re.compile(
    r"(^|[=,;(\[{<>$&]|\\\\|matrix\}|\\(?:le|leq|ge|geq|ne|neq|approx|in)(?![a-z])|\\text\s*\{ ?(?:and|or) ?\})"
    r"(\s*[+-]?\d+) +(\d+)/(\d+)"
    r"(?=\s*(?:$|[,;)\]}<>=%&]|\\(?:text|end|cup|le|leq|ge|geq)(?![a-z])|\\[%\\}]|[a-zA-Z]{2}))"
)
"""A whole number and a fraction, alone between its neighbours: 5 1/2."""
_SPACED_DIGITS = re.compile(rf"({_TAKES})?(\d+)\s+(?=\.?\d)")
_WORDS = re.compile(r"(\\text\s*\{[^{}]*\})")
_GREEK = (
    "alpha|beta|gamma|delta|(?:var)?(?:epsilon|theta|phi|rho)|zeta|eta|iota|kappa|lambda|mu|nu|xi|pi|sigma|tau|chi|psi"
    "|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega"
)
_TOKEN = rf" ?(\d|[a-zA-Z]|\\(?:{_GREEK})(?![a-zA-Z]))"
"""What an argument without braces is: \\frac12 is a half. Of several digits of \\binom or of a root with an index, TeX
would take the first one, which is not what is meant: these are left as they are."""
_BRACES = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_ARGUMENTS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rf"\\(frac|binom(?! ?\d\d\d))(?![a-zA-Z]){_TOKEN}(?=.)", r"\\\1{\2}"),
        (rf"(\\frac\{{[^{{}}]*\}}){_TOKEN}", r"\1{\2}"),
        (rf"(\\binom\{{[^{{}}]*\}}){_TOKEN}(?!\d)", r"\1{\2}"),
        (rf"(\\sqrt)(?![a-zA-Z]){_TOKEN}", r"\1{\2}"),
        (rf"(\\sqrt\[[^\[\]{{}}]*\]){_TOKEN}(?!\d)", r"\1{\2}"),
        (rf"(\^|\\sqrt(?:\[[^\[\]{{}}]*\])?)(\\(?:frac|binom){_BRACES}{_BRACES})", r"\1{\2}"),
        (
            r"(\\(?:vec|hat|bar|tilde|d?dot|(?:over|under)line|wide(?:hat|tilde)|overrightarrow|math(?:bb|cal|frak|scr))"
            r"(?![a-zA-Z])) ?([a-zA-Z])(?![a-zA-Z\d])",
            r"\1{\2}",
        ),
    )
)

_FUNCTIONS = (
    "sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|frac|mod|arcsin|arccos|arctan|sinh|cosh|tanh|and|or|over|choose|times"
)
_TYPED_UNIT = re.compile(
    rf"(?<=[\d}}])(?:\s+((?!(?:{_FUNCTIONS})(?![a-zA-Z]))(?:[a-zA-Z]{{4,}}|a\.?m\.?|p\.?m\.?|sq\.?|cu\.?|[cmkn]m|[km]g|m[lL]|ft|in|"
    r"mi|yd|oz|lbs?|min|sec|hrs?|mph|kph|km/h|m/s|day|men)(?:(?: +|/)(?!(?:and|or)(?![a-zA-Z]))[a-zA-Z.]+)*)"
    r"|\s*([cmk]m|kg|mph))(\^\{?[23]\}?)?\.?$"
)
"""A unit that is typed without `\\text`: known short ones, and words, after a number. A single letter is a variable."""
_GROUPED = re.compile(r"(?<=\d)(?:,?\s*\\[!,]\s*|\{,\})(?=\d{3}(?!\d))")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)")
_BRACKET = re.compile(r"\\[()\[\]]|(?P<opens>(?P<argument>(?<=[A-Za-z}\]^_])\{)|\\\{|[(\[{])|(?P<closes>\\\}|[)\]}])")
"""A bracket; `\\(` and `\\[`, which begin a formula, match without a group."""
_SCIENTIFIC = re.compile(r"((?:^|[,;(\[{=<>\s])[+-]?(?:\d+\.?\d*|\.\d+))[eE]([+-]?\d{1,4})(?=\s*(?:$|[,;)\]}=<>%]|\\))")


@lru_cache(maxsize=1024)
def canonical_latex(latex: str) -> str:
    r"""One spelling of the same LaTeX: no layout, no blanks, \frac{a}{b}, \sqrt{a}, x^2, no full stop at the end.

    A number such as 3e6 becomes 3E6, which cannot be a formula (`equality.read_number`).
    """
    text = _plain(_DOTS.sub(r"\\dots ", _typed(latex)))
    text = _SCIENTIFIC.sub(r"\1E\2", strip_delimiters(text))
    text = _IDEOGRAPHS.sub(r"\\text{\1}", _words(text))
    text = _parted(_SOFT.sub(" ", _GROUPED.sub("", text)).strip())
    text = _TYPED_UNIT.sub(lambda match: f"\\text{{{match[1] or match[2]}}}{match[3] or ''}", text)
    text = _REPLACE.sub(lambda match: _REPLACED[match[0]], text)
    text = _PI.sub(lambda match: "\\pi " if match[1] == "pi" else "\\infty ", join_thousands(text))
    return _dense(text).rstrip(".,;")


def _plain(text: str) -> str:
    """Without what only surrounds an answer, and with one spelling for words that have a sign."""
    text = _ENDS.sub("", text.strip())
    text = text[start.end() :] if (start := _STARTS.match(text)) else text
    for pattern in (_STRONG, _ORDINAL, _CHOICE):
        text = found[1] if (found := pattern.fullmatch(text)) else text
    text = "\\emptyset" if _NO_SOLUTION.fullmatch(text) else text
    text = _SYSTEM.sub(lambda found: ",".join(filter(str.strip, found[2].split("\\\\"))), text)
    return _TYPED_ROOT.sub(r"\\sqrt{\1}", text)


def join_thousands(text: str) -> str:
    """The text without the commas that separate thousands: 1,200 becomes 1200, but not 1,2 or (1,200), because in
    brackets a comma separates entries. The braces of a set are brackets, those of an argument are not."""
    enclosed = _enclosed(text)
    return _THOUSANDS.sub(lambda match: match[0] if enclosed[match.start()] else match[0].replace(",", ""), text)


def _enclosed(text: str) -> list[int]:
    """The number of brackets around each character. Square ones without a partner are an open interval's: ]1,2[."""
    changes = [0] * len(text)
    opened: list[re.Match[str]] = []
    alone: list[re.Match[str]] = []
    for found in _BRACKET.finditer(text):
        if found["opens"]:
            opened.append(found)
        elif found["closes"] and opened:
            start = opened.pop()
            changes[start.start()] += not start["argument"]
            changes[found.start()] -= not start["argument"]
        elif found["closes"] == "]":
            alone.append(found)
    if alone := alone + [one for one in opened if one["opens"] == "["]:
        changes[alone[0].start()] += 1
        changes[alone[-1].start()] -= 1
    return list(accumulate(changes))


def _parted(text: str) -> str:
    """Blanks between digits, outside words: 1 000 is a number, 5 1/2 a mixed one, and 5 6 none."""
    text = _SPACED_MIXED.sub(r"\1\2\\frac{\3}{\4}", _SPACED_NUMBERS.sub(_grouped, text))
    parts = _WORDS.split(text)
    parts[::2] = [
        _SPACED_DIGITS.sub(lambda match: match[0] if match[1] else match[2] + GAP, part) for part in parts[::2]
    ]
    return "".join(parts)


def _grouped(match: re.Match[str]) -> str:
    """Digits in groups of three as one number. 3 125/216 may be 3125/216 or a mixed number, so it is neither."""
    taking, run, below = match.groups()
    first, *rest = run.split()
    if taking:
        return f"{taking}{first} {_SPACED_NUMBERS.sub(_grouped, ' '.join(rest))}"
    if not _GROUPS.fullmatch(" ".join((first, *rest))):
        return match[0]
    is_mixed = below and len(rest) == 1 and not rest[0].startswith("0") and int(rest[0]) < int(below)
    return (GAP if is_mixed else "").join((first, *rest))


def _typed(text: str) -> str:
    """Characters that people type, in LaTeX: x² → x^{2}, ½ → \\frac{1}{2}, √2 → \\sqrt{2}, full-width signs, α."""
    if text.isascii():
        return text
    text = unicodedata.normalize("NFKC", _EARLY.sub(_early, text).replace("…", "\\dots "))
    text = "".join(map(_ascii, text.translate(_SIGNS)))
    text = _JOINED.sub(lambda match: f"\\text{{ {_CONJUNCTIONS[(match[1] or match[2] or match[3])[0]]} }}", text)
    return _ROOT.sub(lambda match: f"\\sqrt{_INDEX[match[1]]}{{{match[2] or match[3] or match[4]}}}", text)


def _early(match: re.Match[str]) -> str:
    """Convert characters that compatibility normalization would merge with their neighbours: x² would become x2."""
    plain = unicodedata.normalize("NFKC", match[0]).replace("−", "-")
    if match.lastgroup in ("up", "down"):
        return f"{'^' if match['up'] else '_'}{{{plain}}}"
    if match["part"]:
        above, _, below = plain.partition("⁄")
        return f"\\frac{{{above}}}{{{below}}}"
    return f"\\mathbb{{{plain}}}" if match["set"] else "^\\circ "


def _ascii(character: str) -> str:
    """Convert digits of any script to ASCII, and Greek letters to commands."""
    if character.isascii():
        return character
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    kind, _, letter = unicodedata.name(character, "").replace("LAMDA", "LAMBDA").partition(" LETTER ")
    if kind not in ("GREEK SMALL", "GREEK CAPITAL") or not letter.isalpha():
        return character
    return f"\\{letter.lower() if kind.endswith('SMALL') else letter.capitalize()} "


def _words(text: str) -> str:
    r"""All words as \text{…}. The constants e, i and \pi, and numbers, keep their meaning in any font."""
    text = _OLD_FONT.sub(r"{\\mathrm{\1}}", text) if "{" in text else text
    text = _TEXT.sub(r"\\text", text)
    for _ in range(text.count("{")):  # nested fonts, from the inside out
        plain = _NESTED.sub(r"\1\2", _FONT.sub(_upright, text))
        if plain == text:
            break
        text = plain
    text = _CONSTANT.sub(lambda match: "\\pi " if (match[1] or "").endswith("pi") else (match[1] or "i")[-1:], text)
    text = _TYPED_AND.sub(r"\\text{\1}", _PER_CENT.sub("%", text))
    return _TEXT_NUMBER.sub(lambda match: match[1] + (f"\\text{{{match[2]}}}" if match[2].strip() else ""), text)


def _upright(match: re.Match[str]) -> str:
    """Strip the font from a formula. Letters are words, except for a single letter that is not a unit."""
    inner = (match[1] if match[1] is not None else match[2]).strip()
    if inner.startswith("\\text") and inner.endswith("}") and inner.count("}") == 1:
        return inner
    if inner in ("e", "i", "pi", "\\pi", "\\imath"):
        return f"\\text{{{inner}}}"
    if inner.isalpha() and len(inner) == 1 and inner not in "mgshlLF":
        return inner if inner.islower() else f"\\text{{{inner}}}"
    return f"\\text{{{inner}}}" if re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", inner)) else inner


def _dense(text: str) -> str:
    """Remove blanks, and add the braces that LaTeX makes optional."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", lambda match: f"\\text{{{'~'.join(match[1].split())}}}", text)
    text = re.sub(r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])", r"\1~", text)  # \pi r is not \pir
    text = re.sub(r"(\^|(?<!\\log)_)\s*(-(?:\d+|[a-zA-Z])|\d+)", r"\1{\2}", text)  # 10^-5 is typed for 10^{-5}
    text = re.sub(r"\s+", "", text).replace("~", " ")
    for pattern, replacement in _ARGUMENTS:
        text = pattern.sub(replacement, text)
    text = re.sub(r"(?<=[\w)}])\*(?=[\w(\\{])", r"\\cdot ", text)
    text = re.sub(r"([\^_])\{(\w|\\circ)\}(?!\d)", r"\1\2", text)
    text = re.sub(r"\\cdot (?![a-zA-Z])", r"\\cdot", text)
    return "\\emptyset" if text in ("\\{\\}", "{}") else _unbraced(text)


def _unbraced(text: str) -> str:
    """{1, 2} is typed for the set; other braces around the whole text have no meaning."""
    while text.startswith("{") and text.endswith("}") and is_closed(text[1:-1]):
        if len(split_parts(text[1:-1], ",")) > 1:
            return f"\\{text[:-1]}\\}}"
        text = text[1:-1]
    return text
