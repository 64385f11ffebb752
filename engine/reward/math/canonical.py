r"""Rewrites an answer to one spelling: typed characters as LaTeX, one command for several equivalent ones, no layout,
words and units as `\text`."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from itertools import accumulate

AND = re.compile(r",?\s*\\text\{,? ?(and|or)\}\s*|;")
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_LAYOUT = re.compile(
    r"\\(?:left|right|middle|[bB]igg?[lrm]?|(?:display|text|script|scriptscript)style|(?:no)?limits|q?quad|rm|bf|it|sf|tt"
    r"|small|[lL]arge|LARGE|[hH]uge|en(?:space|skip)|(?:neg)?(?:thin|med|thick)space|h?fill|newline)(?![a-zA-Z])\s*"
    r"|(?<!\\)\\[!,;:> /]|~|\\(?:[hv]space\*?|[hv]?phantom|color|label|tag)\s*\{[^{}]*\}"
    r"|\\(?:textcolor\s*\{[^{}]*\}|underline|uline)\s*(?=\{)|\\(?:boxed|fbox|framebox)\s*"
)
_STARTS = re.compile(
    r"(?:\s|=|\\(?:approx|Rightarrow|implies|therefore)(?![a-zA-Z])|\\text\s*\{[^{}]*\b[aA]nswer(?: is)?\s*:?\s*\})+"
)
_ENDS = re.compile(r"(?:\\(?:[,;:!\\\s]|text\s*\{[\s.,;:]*\}|$)|[,;\s]|(?<!\.)\.)+$")
_WHOLE = re.compile(
    r"\*\*([^*]+)\*\*|(\d+)\s*(?:\^\s*\{?)?(?:\\(?:text|mathrm)\s*\{)?\s*(?:st|nd|rd|th)\s*\}{0,2}"
    r"|(?:\\text\s*\{)?\s*(?:[oO]ption|[cC]hoice)\s+\(?([A-Z])\)?\s*\}?"
)
"""Strong type, an ordinal number, the letter of an option: the group is the answer."""
_NO_SOLUTION = re.compile(r"(?:\\text\s*\{)?\s*(?:there (?:is|are) )?no (?:real )?solutions?\s*\}?|无解", re.IGNORECASE)
_SYSTEM = re.compile(r"\\begin\{(cases|array|aligned)\}(?:\{[lcr]\})?([^&]*)\\end\{\1\}")
_TEXT = re.compile(r"\\(?:[mh]box|emph|text(?:normal|rm|bf|it|sf|tt|sc|sl|up|md))(?=\s*\{)")
_NESTED = re.compile(r"(\\text\s*\{[^{}]*)\\text\s*\{([^{}]*)\}")
_FONT = re.compile(
    r"\\(?:mathrm|mathbf|mathit|mathsf|mathnormal|operatorname|boldsymbol|bm)\*?\s*"
    r"(?:\{((?:[^{}]|\{[^{}]*\})*)\}|([a-zA-Z])(?![a-zA-Z]))"
)
_CONSTANT = re.compile(r"\\text\s*\{\s*\\?(e|i|pi)\s*\}|\\(i)math(?![a-zA-Z])|(?<![a-zA-Z\\])(pi|infinity)(?![a-zA-Z])")
_CONSTANTS = {"e": "e", "i": "i", "pi": "\\pi ", "infinity": "\\infty "}
_TEXT_NUMBER = re.compile(r"(?<![\d}])\\text\s*\{\s*([-+]?[\d.,]*\d)(?:\s*|([^{}\d]+))\}")
_PER_CENT = re.compile(r"\s*\\text\s*\{\s*per ?cent\s*\}|(?<=[\d}])\s*per ?cent$")
_TYPED_AND = re.compile(r"(?<![a-zA-Z\\])(and|or)(?![a-zA-Z]|[^{}]*\})")
_SPELLINGS = r"""\dfrac:\frac \tfrac:\frac \cfrac:\frac \dbinom:\binom \tbinom:\binom \leq:\le \geq:\ge \leqslant:\le
\geqslant:\ge <=:\le~ >=:\ge~ \lt:< \gt:> \neq:\ne !=:\ne~ \not=:\ne~ \degree:^\circ \degrees:^\circ
\lg:\log_{10} \log_e:\ln \backslash:\setminus \varnothing:\emptyset \lbrace:\{ \rbrace:\} \lvert:| \rvert:| \vert:|
\%:% ^{\circ}:^\circ {,}:, **:^ \ldots:\dots \cdots:\dots ...:\dots~ \langle:( \rangle:) \R:\mathbb{R}"""
_REPLACED = dict(pair.split(":") for pair in _SPELLINGS.split())
_KEYS = "|".join(re.escape(key) + ("(?![a-zA-Z])" if key[-1].isalpha() else "") for key in _REPLACED)
_REPLACE = re.compile(_KEYS.replace("!=", r"(?<!\d)!="))  # 4!=24 states a factorial
_TYPED = r"""−- –- —- ‐- ‑- ×\times ·\cdot ⋅\cdot ÷\div ±\pm ∓\mp ∞\infty ∪\cup ∩\cap ∈\in ∅\emptyset ≤\le ≥\ge ≠\ne
≈\approx ∠\angle °^\circ º^\circ ∶: ⁄/ 、, 。. …\dots ⋯\dots ′'
ℝ\mathbb{R} ℤ\mathbb{Z} ℚ\mathbb{Q} ℕ\mathbb{N} ℂ\mathbb{C} α\alpha β\beta
γ\gamma δ\delta ε\epsilon θ\theta λ\lambda μ\mu π\pi ρ\rho σ\sigma τ\tau φ\phi ω\omega Δ\Delta Ω\Omega"""
_SIGNS = str.maketrans({pair[0]: pair[1:] + " " * pair[-1].isalpha() for pair in _TYPED.split()})
_RAISED = re.compile(r"([¹²³ʰ-ʸˠ-ˤᴬ-ᵡᶛ-ᶿ⁰-ⁿⱽ]+)|([ᵢ-ᵪ₀-ₜⱼ]+)|[¼-¾⅐-⅞]")
_ROOT = re.compile(
    r"(?:√|(?<![a-zA-Z\\])sqrt(?= *\())\s*(?:\{([^{}]*)\}|\(([^()]*)\)|(\d+(?:\.\d+)?|[a-zA-Z]|\\[a-zA-Z]+))"
)
_CHINESE_AND = re.compile(r"\\text\s*\{\s*(或|且|和)\s*\}|(?<![\u4e00-\u9fff])(或|且|和)|或(?=\s*[-+.\d])")
"""A word between two formulas, not inside other words. After a unit 或 joins two numbers, while 和 may be a sum."""
_CHINESE_UNIT = re.compile(
    r"(?<=[\d}%)])\s*([\u4e00-\u9fff]+(?:/[\u4e00-\u9fff]+)?)(?=\s*(?:$|[,;]|\\text\s*\{\s*(?:and|or)))"
)
_MIXED = re.compile(r"(^|[=,;(\[{<>&]|\\\\|matrix\})(\s*[+-]?\d+) +(\d+)/(\d+)(?=\s*(?:$|[,;)\]}<>&%]|\\|[a-zA-Z]{2}))")
"""A whole number and a fraction, alone between its neighbours: 5 1/2."""
_SPACED = re.compile(
    r"(\\text\s*\{[^{}]*\}|(?:[\^_]\s*-?|\\(?:[dtc]?frac|sqrt(?:\[\d\])?|[dt]?binom)\s*)\d+\s+(?=\d))"
    r"|(?<![\d.,\w])(\d{1,3}(?: \d{3})+)(?! *[/\d])|(\d+)\s+(?=\.?\d)"
)
"""What has a blank after it; one number whose digits blanks part by threes; a number before another one, which is no
formula: 5 6 is neither 56 nor 30."""
GREEK = (
    "alpha|beta|gamma|delta|(?:var)?(?:epsilon|theta|phi|rho)|zeta|eta|iota|kappa|lambda|mu|nu|xi|pi|sigma|tau|chi|psi"
    "|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega"
)
_TOKEN = rf" ?(\d|[a-zA-Z]|\\(?:{GREEK})(?![a-zA-Z]))"
"""What an argument without braces is: \\frac12 is a half. Of several digits (\\sqrt17) TeX would take the first one,
which is not what is meant: these are left as they are, and are no formula."""
BRACES = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_DENSE = (
    (r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])", r"\1~"),  # \pi r is not \pir
    (r"(\^|(?<!\\log)_)\s*(-(?:\d+|[a-zA-Z])|\d+)", r"\1{\2}"),  # 10^-5 is typed for 10^{-5}
    (r"\s+", ""),
    ("~", " "),
    (r"\\times(?![a-zA-Z])(?!.*\\(?:vec|hat|over)|(?<=[a-zA-Z]\\times) ?[a-zA-Z])", r"\\cdot "),  # no cross product
    (rf"\\(frac|binom(?! ?\d\d\d))(?![a-zA-Z]){_TOKEN}(?=.)", r"\\\1{\2}"),
    (rf"(\\(?:frac|binom)\{{[^{{}}]*\}}|\\sqrt(?:\[[^\[\]{{}}]*\]|(?![a-zA-Z]))){_TOKEN}(?!\d)", r"\1{\2}"),
    (rf"(\^|\\sqrt(?:\[[^\[\]{{}}]*\])?)(\\(?:frac|binom){BRACES}{BRACES})", r"\1{\2}"),
    (r"(\\(?:vec|hat|bar|tilde|dot|overline|overrightarrow|mathbb))(?![a-zA-Z]) ?([a-zA-Z])(?![a-zA-Z\d])", r"\1{\2}"),
    (r"(?<=[\w)}])\*(?=[\w(\\{])", r"\\cdot "),
    (r"([\^_])\{(\w|\\circ)\}(?!\d)", r"\1\2"),
    (r"\\cdot (?![a-zA-Z])", r"\\cdot"),
)
"""Patterns and replacements, in turn: no blanks, and the braces that LaTeX makes optional."""
_UNIT = re.compile(
    r"(?<=[\d}])(?:\s+((?!(?:sin|cos|tan|cot|sec|csc|log|exp|sqrt|frac|mod|arc\w*|and|or|over|choose|times)(?![a-zA-Z]))"
    r"(?:[a-zA-Z]{4,}|[ap]\.?m\.?|sq\.?|cu\.?|[cmk]m|[km]g|ft|in|mi|yd|oz|lbs?|min|hrs?|mph|m/s|day|men)"
    r"(?:(?: +|/)(?!(?:and|or)(?![a-zA-Z]))[a-zA-Z.]+)*)|\s*([cmk]m|kg|mph))(\^\{?[23]\}?)?\.?$"
)
"""A unit that is typed without `\\text`: known short ones, and words, after a number. A single letter is a variable."""
_GROUPED = re.compile(r"(?<=\d)(?:\s*\\[!,]\s*|,\s*\\!\s*|\{,\})(?=\d{3}(?!\d))")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)")
_BRACKET = re.compile(r"(\\[()\[\]{}]|[()\[\]{}])")
_SCIENTIFIC = re.compile(r"((?:^|[,;(\[{=<>\s])[+-]?(?:\d+\.?\d*|\.\d+))[eE]([+-]?\d{1,4})(?=\s*(?:$|[,;)\]}=<>%]|\\))")


@lru_cache(maxsize=1024)
def canonical_latex(latex: str) -> str:
    r"""One spelling of the same LaTeX: no layout, no blanks, \frac{a}{b}, \sqrt{a}, x^2, no full stop at the end.

    A number such as 3e6 becomes 3E6, which cannot be a formula (`quantities.read_number`).
    """
    text = unicodedata.normalize("NFKC", _RAISED.sub(_raised, latex).translate(_SIGNS))
    text = "".join(str(unicodedata.decimal(each, each)) for each in text.translate(_SIGNS))
    text = _CHINESE_AND.sub(lambda found: rf"\text{{ {'or' if '或' in found[0] else 'and'} }}", text)
    text = _ENDS.sub("", _ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2] or found[3]}}}", text).strip())
    text = text[start.end() :] if (start := _STARTS.match(text)) else text
    text = next(filter(None, found.groups())) if (found := _WHOLE.fullmatch(text)) else text
    text = "\\emptyset" if _NO_SOLUTION.fullmatch(text) else text
    text = _SYSTEM.sub(lambda found: ",".join(filter(str.strip, found[2].split("\\\\"))), text)
    text = _words(_SCIENTIFIC.sub(r"\1E\2", strip_delimiters(text)))
    text = _LAYOUT.sub(" ", _GROUPED.sub("", _CHINESE_UNIT.sub(r"\\text{\1}", text))).strip()
    text = _SPACED.sub(
        lambda found: found[1] or (f"{found[3]}␣" if found[3] else found[2].replace(" ", "")),
        _MIXED.sub(r"\1\2\\frac{\3}{\4}", text),
    )
    text = _UNIT.sub(lambda found: f"\\text{{{found[1] or found[2]}}}{found[3] or ''}", text)
    text = join_thousands(_REPLACE.sub(lambda found: _REPLACED[found[0]].replace("~", " "), text))
    text = re.sub(r"\\text\s*\{([^{}]*)\}", lambda found: f"\\text{{{'~'.join(found[1].split())}}}", text)
    for pattern, replacement in _DENSE:
        text = re.sub(pattern, replacement, text)
    while text.startswith("{") and text.endswith("}") and is_closed(text[1:-1]):  # {1,2} is typed for the set
        text = f"\\{text[:-1]}\\}}" if len(split_parts(text[1:-1], ",")) > 1 else text[1:-1]
    return text.rstrip(".,;") if text.strip("\\{}") else "\\emptyset"


def strip_delimiters(latex: str) -> str:
    """The text without surrounding blanks and without one pair of formula delimiters."""
    bare = latex.strip()
    for left, right in _DELIMITERS:
        if bare.startswith(left) and bare.endswith(right) and len(bare) > len(left) + len(right):
            inner = bare[len(left) : -len(right)]
            return bare if left in inner.replace("\\$", "") or inner.endswith("\\") else inner.strip()
    return bare


def join_thousands(text: str) -> str:
    """The text without the commas that separate thousands: 1,200 becomes 1200, but not 1,2 or (1,200), because in
    brackets a comma separates entries. The braces of a set are brackets, those of an argument are not."""
    found = ""
    opened = [text.lstrip().startswith("]")]  # an open interval: ]1,200[
    for part in _BRACKET.split(text):
        if part in ("(", "[", "{", "\\{"):
            opened.append(part != "{" or not re.search(r"[A-Za-z}\]^_]$", found))
        elif part in (")", "]", "}", "\\}") and opened[1:]:
            opened.pop()
        found += part if any(opened) else _THOUSANDS.sub(lambda match: match[0].replace(",", ""), part)
    return found


def split_parts(text: str, *separators: str) -> list[str]:
    """The parts between separators that are outside brackets; the text itself if there are no separators."""
    parts = []
    depth = start = 0
    for token in re.finditer(r"\\(?:cup|cap|setminus|approx|in)(?![a-zA-Z])|\\.|[()\[\]{},:=]", text, re.DOTALL):
        if token[0] in separators and depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
        depth += (token[0] in ("(", "[", "{", "\\{")) - (token[0] in (")", "]", "}", "\\}"))
    return [part.strip() for part in [*parts, text[start:]] if part.strip()] or [text]


def is_list(text: str) -> bool:
    """Whether a text is a list: in `x = 1, y = 2` each entry is an equation."""
    return len(split_parts(AND.sub(",", text), ",")) > 1


def is_closed(text: str, brackets: str = r"\\[{}]|[()\[\]{}]") -> bool:
    """Whether each bracket that is opened is closed, and none other."""
    depths = [*accumulate((1 if token[-1] in "([{" else -1 for token in re.findall(brackets, text)), initial=0)]
    return min(depths) == 0 == depths[-1]


def _raised(match: re.Match[str]) -> str:
    """Convert characters that compatibility normalization would merge with their neighbours: x² would become x2."""
    above, _, below = plain = unicodedata.normalize("NFKC", match[0]).replace("−", "-").partition("⁄")
    return f"\\frac{{{above}}}{{{below}}}" if below else f"{'^' if match[1] else '_'}{{{plain[0]}}}"


def _words(text: str) -> str:
    r"""All words as \text{…}. The constants e, i and \pi, and numbers, keep their meaning in any font."""
    text, plain = _TEXT.sub(r"\\text", text), ""
    while text != plain:  # nested fonts, from the inside out
        text, plain = _NESTED.sub(r"\1\2", _FONT.sub(_upright, text)), text
    text = _CONSTANT.sub(lambda match: _CONSTANTS[match[1] or match[2] or match[3]], text)
    text = _TYPED_AND.sub(r"\\text{\1}", _PER_CENT.sub("%", text))
    return _TEXT_NUMBER.sub(lambda match: match[1] + (f"\\text{{{match[2]}}}" if match[2] else ""), text)


def _upright(match: re.Match[str]) -> str:
    """Strip the font from a formula. Letters are words, except for a single letter that is not a unit."""
    inner = (match[1] if match[1] is not None else match[2]).strip()
    if re.fullmatch(r"\\text\s*\{[^{}]*\}|[a-z](?<![eimgshl])", inner):
        return inner
    return f"\\text{{{inner}}}" if re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", inner)) else inner
