r"""Reads which answer a response states. Rewards and votes use it, so they read the same answer.

It works on text and evaluates nothing, so a hostile response costs linear time. Whether two answers are equal is
decided elsewhere (`engine.reward.math`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_TAIL = 2_000
"""Number of characters at the end of a response in which a last expression is searched."""
_NEAR = 100
"""Largest distance in characters between two boxes of one list."""
_MOST = 12
"""Largest number of boxes of one list."""
_PHRASES = 20
"""Number of phrases, from the last one, of which one may state an answer."""
_REACH = 300
"""Largest number of characters of a statement."""

_THOUGHT = "</think>"
_TAG = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)
_BRACES = re.compile(r"\\(?:[bB]oxed|f(?:rame)?box)\s*\{|\\.|[{}]", re.DOTALL)
_OPENED = re.compile(r"\\boxed\s*\{")
_BLANK = r"(?:\s|\$|\\[()\[\],;!]|\\q?quad)*+"
_WORD = r"(?:\\text\{\s*)?(and|or|和|或)(?:\s*\})?"
_BETWEEN = re.compile(
    rf"{_BLANK}(?:[,;，；、]{_BLANK}(?:{_WORD})?|{_WORD}){_BLANK}(?:[a-zA-Z](?:_\{{?\w\}}?)?\s*=)?{_BLANK}"
)
"""Text that may stand between two boxes of one list."""
_JOINED = {"and": "and", "or": "or", "和": "and", "或": "or"}
_NAMED = re.compile(r"([a-zA-Z](?:_\{?\w\}?)?\s*=)\s*\$?\s*$")

_EMPHASIS = re.compile(
    r"(?<![\w)*])\*\*|\*\*(?![\w(*])|(?<!\w)__|__(?!\w)|`|</?(?:b|i|u|em|strong|p|span)>|(?<!\S)\*(?=[^\s*])|(?<=[^\s*])\*(?=\s|$)"
)
"""Markdown around a word or a formula. 2**3 is a power."""
_FORMULA = re.compile(
    r"(?<!\\)\$\$(.{1,1000}?)(?<!\\)\$\$|(?<![\\$])\$(?!\$)([^\n]{1,300}?)(?<!\\)\$"
    r"|\\\[(.{1,1000}?)\\\]|\\\((.{1,1000}?)\\\)",
    re.DOTALL,
)
_MONEY = re.compile(r"\s*\d[\d.,]*(?:\s.*[a-zA-Z]{2}|.*[-+/*=\s]$)", re.DOTALL)
"""What stands between two dollar signs that are currencies: $18 and $2."""
_ATOM = re.compile(
    r"""\\begin\{([a-z]{1,20}\*?)\}.{0,300}?\\end\{\1\}|\\(?:text|mbox|math[a-z]+|text[a-z]+|operatorname)\*?\s*\{[^{}]*\}|\\[a-zA-Z]+|\\.
    |[-−–]?\$?(?:\d{1,3}(?:[,\ ]\d{3})+(?!\d)|\d+)(?:[.]\d+)?(?:[eE][-+]?\d+(?!\w))?(?:[a-zA-Z]{1,3}(?![a-zA-Z]))?
    |\.\d+
    |(?:sqrt|cbrt|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp|pi|infinity|mod|max|min)(?![a-zA-Z])
    |(?![aAI]\ +(?!and\b|or\b)[a-z]{2}|[ap]\.m\.|i\.e\.|e\.g\.)[a-zA-Z](?![a-zA-Z])|[A-Z]{2,5}(?![a-zA-Z])
    |:(?!\s)|(?<=\s):|[-+*/^=<>|_;,()\[\]{}'!%&]|\.(?=\d)
    |[α-ωΑ-Ωϕ√∛∜∞∅ℕℤℚℝℂ∪∩∈≤≥≠≈±∓×·⋅÷−–°′∠△⊥‰¼-¾⅐-⅞²³¹⁰-₉₊₋⁺⁻（），、；∶€£¥㎝㎏]""",
    re.VERBOSE | re.DOTALL,
)
"""A part of an expression that is typed outside formulas."""
_APART = re.compile(r"\d\s+\d(?!\d*/\d)")
"""Two numbers that are not one: 5 6, but not 5 1/2."""
_IS_SAID = re.compile(r"(?:^|\b(?:are|is)|[:：是为])\s*$")
_NOTHING = re.compile(r"[\s.!。]*")
_STRUCTURE = re.compile(r"[(\[{].*,.*[)\]}]|[a-zA-Z]\s*[=<>≤≥∈]|[ap]\.?m\.?$|[−√π∞]", re.DOTALL)
"""What math-verify would read in part only: a tuple, a named value, a typed sign."""
_SIGNS = r"\d.\s+\-*×/^()÷"
_NUMBER = re.compile(
    r"(?:^|[\s=])(?:\*\*)?[$€£¥₹]?(?<!\d)(-?(?:[1-9]\d{0,2}(?:[ ,]\d{3})+(?:\.\d+)?|\d+(?:[.,]\d+)?|\.\d+)"
    r"(?:\s*(?:%|[Pp]er ?cent))?)"
)
_SUM = re.compile(
    rf"(?:^|[\s=])(?:\*\*)?(-?\(?-?\d[{_SIGNS}]*[+\-*×/^()÷][{_SIGNS}]*[\d)])(?!\s*[+\-*×/^÷])(?:\*\*)?(?:[.,:\s)$]|$)"
)
"""Numbers and arithmetic where math-verify 0.9.0 sees them outside formulas."""
_STEP = re.compile(r"\w+|\W", re.DOTALL)
_GAP = re.compile(r"[^\S\n]*(?:(?:and|or)\b[^\S\n]*|[和或及])?")
_CONTENT = re.compile(r"[\w√∞∅½-¾ℝ]|\\[a-zA-Z]")
_AND = re.compile(r"\s*(?:[,;，、]\s*)?(?:\b(?:and|or)\b|和|或|及|(?<!\d),|,(?!\d{3}(?!\d))|[;，、])\s*")
_UNITS = (
    r"%|‰|percent\b|per ?cent\b"
    r"|(?:hundred|thousand|[mbtr]+illion|dozen)s?\b(?:\s+(?:hundred|thousand|[mbtr]+illion)\b)?"
    r"|(?:or|and)\s+(?:more|less|fewer|greater|above|below|under|over)\b|(?:more|less|fewer)\s+than\b|at\s+(?:least|most)\b"
    r"|(?:times|plus|minus|squared|cubed|factorial|modulo|mod|base)\b|[ap]\.?m\b\.?|°"
    r"|(?:square|cubic|sq\.?|cu\.?)?\s*(?:[cmk]?m|[km]?g|[mc]?l|inch(?:es)?|feet|foot|ft|yards?|miles?|mph|[kc]?m/h|km/h"
    r"|(?:(?:centi|milli|kilo)?(?:met(?:er|re)|gram|lit(?:er|re)))s?|cents?|dollars?|euros?|pounds?|ounces?|tons?|gallons?"
    r"|seconds?|minutes?|hours?|days?|weeks?|months?|years?|degrees?)\b(?:\s*(?:\^\{?[23]\}?|[²³]|(?:per|/)\s*\w+))?"
    r"|(?!项)[一-鿿]{1,4}(?![一-鿿])"
)
_BEHIND = re.compile(rf"\s*(?:{_UNITS})(?:\s+(?:{_UNITS}))?")
"""Words behind an expression that belong to it. Others only say what is counted."""

_FILLER = re.compile(
    r"""(?:[\s:：="“”'*#>-](?![\d.(\\a-zA-Z])|[\s:：="“”*#>]|(?:therefore|thus|then|simply|just|exactly|only|approximately|about
    |roughly|around|indeed|clearly|still|equal\s+to|equals|given\s+by|as\s+follows|(?:option|choice|letter)(?=\s*\(?[A-Z]\b)
    |(?:the\s+|an?\s+)?(?:ordered\s+)?(?:value|number|set|interval|point|pair|triple|matrix|vector|fraction|expression
    |function|polynomial|integer|options?|choice|选项)(?:\s+of)?)(?![a-zA-Z])[\s,:：]*)*""",
    re.VERBOSE | re.IGNORECASE,
)
"""What may stand between "the answer is" and the answer."""
_IS = r"\b(?:is|are|was|be|equals?|becomes|lies)\b(?!\s+not\b)|[:：=](?!=)"
_SAYS = re.compile(
    rf"""\b(?:answers?|ans)\b(?!\s{{1,9}}(?:choices|options)|>)(?:[^\n.:：=?!<>$\d]{{0,60}}?(?:{_IS})|[^\S\n]{{0,9}}[*_#]{{0,9}}[^\S\n]{{0,9}}\n(?=\s{{0,9}}[-\d$\\(\[A-Z])
    |\s{{0,9}},(?=\s{{0,9}}[-\d$\\(\[])|\s{{1,9}}of(?=\s{{1,9}}[-\d$\\(\[]))
    |答案】?\s{{0,9}}(?:[应该当就便只能]*(?:[是为选]|[:：=])+|(?=[\s\d$\\(\[（A-Z]))|(?:故|应|因此|所以)选\s{{0,9}}[择:：]?|选择?(?:\s{{0,9}}[:：]|(?=\s{{0,9}}[A-D]{{1,4}}(?![a-zA-Z])))
    |答案不是[^，,。\n]{{1,20}}[，,]\s{{0,9}}而?是
    |^[^\S\n]{{0,9}}A\s{{0,9}}[:：](?!=)|(?P<line>^[^\S\n]{{0,9}}\#{{4}}(?!\#))(?=[^\S\n]{{0,9}}\S)""",
    re.VERBOSE | re.IGNORECASE | re.MULTILINE,
)
"""What stands before an answer: "the answer is", "Answer:", a heading with "Answer", 答案是, 故选, ####."""
_SAID = re.compile(
    r"""(?:,?\s{0,9}\b(?:which|that|and\s{1,9}this|and\s{1,9}that))?\s{0,9}(?:\b(?:is|are)\b(?!\s{1,9}(?:not|never)\b)|[就即便]?[是为])\s{0,9}(?:(?:the|our|my|your)\s{1,9})?
    (?:\w{1,20}\s{1,9}){0,2}?\s{0,9}(?:(?:最终|正确|所求|本题)的?)?(?:answers?\b|答案)(?!\s{0,9}(?:[:：=]|is\b|are\b|[是为]))""",
    re.VERBOSE | re.IGNORECASE,
)
"""What stands behind an answer: "is the answer", 是答案."""
_END = re.compile(
    r"\n|\.(?!\d)|[?!;。；？！]|\b(?:because|since|which|so that|but|not|where|with|if|when)\b|因为|所以|,\s"
)
_SENTENCE = re.compile(
    r"\n|\.(?=\s)|[?!;。；？！]\s*|\b(?:so|thus|hence|therefore|then)\b,?|因此|所以|故", re.IGNORECASE
)
_DENIED = re.compile(r"(?:\b(?:not|cannot|never)\b|n't\b|不是)\s*(?:be\s*)?$", re.IGNORECASE)
_REFUTED = re.compile(r"\s*(?:is|are)\s*(?:not|wrong|incorrect)\b|\s*(?:不是|不对)", re.IGNORECASE)
_NO_ANSWER = re.compile(
    r"(?:in|not|no|un)?(?:correct|right|wrong|clear|obvious|valid|unique|consistent|reasonable|true\s+that|in|at|found|to|very|now|also"
    r"|given|that|this|what|it|which|here|there|the|same|left|below|above|yes\s+and|an?)\b",
    re.IGNORECASE,
)
_BOUND = re.compile(
    r"\b(?:at\s+(?:least|most)|less|more|greater|smaller|fewer|than|between|not|no|over|under|above|below|half|twice|double"
    r"|triple|times|minus|plus|from|to|divisible|multiple|power|root|square|cube|factors?|digits?|base|modulo)\b|大于|小于|不",
    re.IGNORECASE,
)
"""Words before a number that make it another one: the answer is at least 5."""


def stated_answers(text: str) -> list[str]:
    r"""The answers that a response states, the most explicit first. Rewards and votes take the first one.

    1. The last `\boxed{…}`. Boxes that only a comma, "and" or "or" separates are one list.
    2. The last `<answer>…</answer>`; the end tag may be missing.
    3. The last statement: "the answer is …", "Answer: …", "… is the answer", 答案是…, 故选…, …是答案, or a line
       `#### …`. It is the first expression of the statement ("18, not 17" states 18), or its words if it has none.
    4. The last expression: a formula or a number.

    What is before `</think>` counts only if nothing follows. A response that ends inside its only box states nothing.
    """
    spoken = text.rpartition(_THOUGHT)[2]
    text = spoken if spoken.strip() else text
    boxed = boxed_answer(text)
    if boxed is None and _OPENED.search(text):
        return []
    plain = _EMPHASIS.sub("", text)
    found = [boxed, _tagged(plain), _last_statement(plain), _last_expression(plain[-_TAIL:])]
    return list(dict.fromkeys(each.strip() for each in found if each is not None))


def boxed_answer(text: str) -> str | None:
    r"""The content of the last `\boxed{…}`. Boxes that are separated only by a comma, "and" or "or" are one list. None
    without a box.

    A name before a box of a list belongs to it: x=\boxed{1}, y=\boxed{2} is x=1, y=2. Equal boxes count once.
    """
    boxes = _last_boxes(text)
    return " ".join(part for box in boxes for part in box[2:]).strip() if boxes else None


def listed_boxes(text: str) -> list[str]:
    """The contents of the boxes that `boxed_answer` joins."""
    return [box.content for box in _last_boxes(text)]


def last_boxed(text: str) -> str | None:
    r"""The content of the `\boxed{…}` that closes last, with balanced braces; None if there is none."""
    found = _boxes(text)
    return found[-1].content if found else None


class _Box(NamedTuple):
    start: int
    stop: int
    content: str
    joined: str = ""


def _last_boxes(text: str) -> list[_Box]:
    found = _boxes(text)
    first = len(found) - 1
    while first > 0 and (between := _between(text, found[first - 1], found[first])):
        first -= 1
        found[first] = found[first]._replace(joined=_JOINED.get(between[1] or between[2], ","))
    last = found[first:]
    if not 1 < len(last) <= _MOST:
        return last[-1:]
    named = [_NAMED.search(text[max(0, box.start - _NEAR) : box.start]) for box in last]
    entries = {(name[1] if name else "") + box.content: box for name, box in zip(named, last, strict=True)}
    if len(entries) == 1:
        return last[-1:]
    listed = [box._replace(content=entry) for entry, box in entries.items()]
    return [*listed[:-1], listed[-1]._replace(joined="")]


def _between(text: str, one: _Box, other: _Box) -> re.Match[str] | None:
    return _BETWEEN.fullmatch(text, one.stop, other.start) if 0 <= other.start - one.stop < _NEAR else None


def _boxes(text: str) -> list[_Box]:
    r"""Every `\boxed{…}` with balanced braces, in the order in which they close. Takes linear time."""
    opened: list[tuple[int, int]] = []  # for each open brace: start of \boxed, or -1; start of its content
    found: list[_Box] = []
    for token in _BRACES.finditer(text):
        if token[0] == "{" or token[0].endswith("{") and len(token[0]) > 2:
            opened.append((token.start() if token[0] != "{" else -1, token.end()))
        elif token[0] == "}" and opened:
            boxed, start = opened.pop()
            if boxed >= 0:
                found.append(_Box(boxed, token.end(), text[start : token.start()]))
    return found


def _tagged(text: str) -> str | None:
    tags = _TAG.findall(text)
    if not tags:
        return None
    content = tags[-1].strip()
    stated = _last_statement(content) or _first_expression(content, whole=True) or _last_expression(content[-_TAIL:])
    return stated or content


def _last_statement(text: str) -> str | None:
    phrases = sorted([*_SAYS.finditer(text), *_SAID.finditer(text)], key=re.Match.end)
    for phrase in phrases[: -_PHRASES - 1 : -1]:
        stated = _stated_before(text, phrase) if phrase.re is _SAID else _stated_behind(text, phrase)
        if stated:
            return stated
    return None


def _stated_behind(text: str, phrase: re.Match[str]) -> str | None:
    """The answer that stands behind a phrase."""
    if _DENIED.search(phrase[0]):
        return None
    line = phrase["line"] is not None
    rest = text[phrase.end() : phrase.end() + _REACH]
    rest = rest[_FILLER.match(rest).end() :]  # type: ignore[union-attr]
    found = _first_expression(rest, whole=line)
    if found or line:
        return found
    words = rest[: end.start()] if (end := _END.search(rest)) else rest
    inside = next(_expressions(words), None)
    words = words.strip(" \t:,\"“”'")
    if inside and re.search(r"\d", inside[2]):
        return words if _BOUND.search(words.partition(inside[2])[0]) else inside[2]
    return None if not words or _NO_ANSWER.match(words) or len(words.split()) > 6 else words


def _stated_before(text: str, phrase: re.Match[str]) -> str | None:
    """The answer that stands before "is the answer"."""
    clause = _SENTENCE.split(text[max(0, phrase.start() - _REACH) : phrase.start()])[-1]
    found = [*_expressions(clause)]
    if found and not clause[found[-1][1] :].strip(" ,"):
        said = [each[2] for each in found if not _is_denied(clause, each[0])]
        return said[-1] if said else None
    words = clause.strip(" \t:,\"“”'")
    return None if not words or found or _NO_ANSWER.match(words) or len(words.split()) > 3 else words


def _first_expression(text: str, whole: bool = False) -> str | None:
    """The expression with which a text begins; with `whole`, only if at most two words follow."""
    found = next(_expressions(text), None)
    if found is None or text[: found[0]].strip(" \t\n\"'"):
        return None
    rest = text[found[1] :].partition("\n")[0] if whole else ""
    return found[2] if not whole or re.fullmatch(r"[\s.!]*|(?:\s+[^\W\d]+){1,2}[\s.]*", rest) else None


def _last_expression(text: str) -> str | None:
    """The expression with which a text ends ("… the point is (2, 3)."), else its last formula or number."""
    if letter := re.fullmatch(r"\s*\(?([A-Z])[).:]*\s*", text):
        return letter[1]
    end = text[-_REACH:]
    for start, stop, found in _expressions(end):
        is_said = _IS_SAID.search(end[:start])
        if _NOTHING.fullmatch(end, stop) and not _is_denied(end, start) and (is_said or _STRUCTURE.search(found)):
            return _last_value(found, is_said is not None)
    formulas = [found for found in _FORMULA.finditer(text) if not _is_money(text, found)]
    candidates = (*formulas, *_NUMBER.finditer(text), *_SUM.finditer(text))
    meant = [each for each in candidates if not _is_denied(text, each.start())]
    last = max(meant, key=lambda each: (each.end(), -each.start()), default=None)
    return None if last is None or _REFUTED.match(text, last.end()) else next(filter(None, last.groups())).strip()


def _is_denied(text: str, start: int) -> bool:
    return _DENIED.search(text[max(0, start - 20) : start]) is not None


def _last_value(found: str, listed: bool) -> str:
    """The last value of an expression that is no list: 10 of 4 + 6 = 10."""
    parts = [part for part in _parts(found) if _CONTENT.search(part)] or [found]
    names = [re.match(r"\s*\(?[a-zA-Z]\w?\)?\s*=(?!.*=)", part) for part in parts]
    if len(parts) > 1 and (listed or all(names)):
        return found
    return parts[-1] if names[-1] else parts[-1].rpartition("=")[2].strip()


def _parts(text: str) -> list[str]:
    """The entries of a list that is typed outside brackets."""
    parts = []
    start = depth = 0
    for token in re.finditer(rf"[(\[{{（]|[)\]}}）]|{_AND.pattern}", text):
        depth += (token[0] in "([{（") - (token[0] in ")]}）")
        if depth <= 0 and token[0] not in "([{（)]}）":
            parts.append(text[start : token.start()])
            start = token.end()
    return [*parts, text[start:]]


def _expressions(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and content of each expression: formulas that a comma or a word joins, or typed mathematics."""
    place = 0
    unpaired = _unpaired(text)
    while place < len(text):
        read = _formulas(text, place) or _typed(text, place, unpaired)
        if read is None:
            step = _STEP.match(text, place)
            place = step.end() if step else place + 1
            continue
        stop, found = read
        if behind := _BEHIND.match(text, stop):
            found += text[stop : behind.end()]
            stop = behind.end()
        yield place, stop, found
        place = max(stop, place + 1)


def _formula(text: str, place: int) -> re.Match[str] | None:
    found = _FORMULA.match(text, place)
    return None if found is None or _is_money(text, found) else found


def _is_money(text: str, found: re.Match[str]) -> bool:
    inner = found[2]
    return bool(
        inner and (_MONEY.match(inner) or (inner[:1].isdigit() and text[found.end() : found.end() + 1].isdigit()))
    )


def _formulas(text: str, place: int) -> tuple[int, str] | None:
    """The formula at a place, and those that follow it after only a comma or "and"."""
    found = _formula(text, place)
    if found is None:
        return None
    joined = next(filter(None, found.groups())).strip()
    stop = found.end()
    while (between := _AND.match(text, stop)) and (found := _formula(text, between.end())):
        joined += f"{between[0]}{next(filter(None, found.groups())).strip()}"
        stop = found.end()
    return stop, joined.rstrip(".,;")


def _unpaired(text: str) -> set[int]:
    """The places of brackets without a partner near them."""
    opened: list[int] = []
    unpaired = set()
    for token in re.finditer(r"\\.|[()\[\]{}（）]", text, re.DOTALL):
        if token[0] in "([{（":
            opened.append(token.start())
        elif token[0] in ")]}）" and not (opened and token.start() - opened[-1] < _REACH):
            unpaired.add(token.start())
        elif token[0] in ")]}）":
            opened.pop()
    return unpaired | set(opened)


def _typed(text: str, place: int, unpaired: set[int]) -> tuple[int, str] | None:
    """The expression at a place that is typed outside formulas; None if there are only signs."""
    stop = place
    found = ""
    while stop < min(len(text), place + _REACH):
        gap = _GAP.match(text, stop)
        begin = gap.end() if gap and found else stop
        formula = _formula(text, begin)
        atom = formula or _ATOM.match(text, begin)
        if atom is None or begin in unpaired or (gap and gap[0].isspace() and _APART.match(text, stop - 1)):
            break
        part = next(filter(None, formula.groups())) if formula else atom[0]
        found += text[stop:begin] + part
        stop = atom.end()
    return _trimmed(found, stop)


def _trimmed(found: str, stop: int) -> tuple[int, str] | None:
    """Without signs at the end, and without brackets that are not closed; None if nothing is left."""
    opened: list[int] = []
    length = len(found)
    for token in re.finditer(r"\\.|[()\[\]{}（）]", found):
        if token[0] in "([{（":
            opened.append(token.start())
        elif token[0] in ")]}）" and not opened:
            length = token.start()
            break
        elif token[0] in ")]}）":
            opened.pop()
    if opened:
        length = min(length, opened[0])
    kept = re.sub(r"(?:[\s.,:;，、；!*+/^=<>_&|(-]|\\[ ,;!])+$", "", found[:length])
    closing = "|" if kept.count("|") % 2 and found[len(kept) : len(kept) + 1] == "|" else ""
    if not _CONTENT.search(kept):
        return None
    return stop - (len(found) - len(kept) - len(closing)), re.sub(r"(?<!\\)\$", r"\\$", kept) + closing
