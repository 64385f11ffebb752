r"""Reads which answer a response states. Rewards and votes use it, so they read the same answer.

It finds text and evaluates nothing, in linear time. A statement is taken whole ("7 over 8"), so that no word that
changes a number is lost; whether it equals another answer is decided in `engine.reward.math`.
"""

from __future__ import annotations

import re

_REACH = 300
"""Largest number of characters of a statement. A last expression is searched in three times as many."""
_PHRASES = 20
"""Number of phrases, from the last one, of which one may state an answer."""

_BRACES = re.compile(r"(?s)\\(?:[bB]oxed|f(?:rame)?box)\s*\{|\\.|[{}]")
_EMPHASIS = re.compile(r"(?<![\w)*])(?:\*\*|__)|(?:\*\*|__)(?![\w(*])|`|</?(?:b|i|em|strong|p|think|s)>|<\|\w{1,20}\|>")
_BLANK = r"(?:[\s${}]|\\[()\[\],;!]|\\q?quad|\\text)*+"
_NAME = rf"(?:[a-zA-Z](?:_\{{?\w\}}?)?\s*=)?{_BLANK}$"
_BETWEEN = re.compile(rf"(?!{_BLANK}{_NAME}){_BLANK}[,;，；、]?{_BLANK}(?:and|or|[和或])?{_BLANK}{_NAME}")

# A formula (in "$18 and $2" there is none), how an expression begins, and the words before it that change nothing.
_FORMULA = (
    r"(?<!\\)\$\$.{1,300}?(?<!\\)\$\$|\\\[.{1,300}?\\\]|\\\(.{1,300}?\\\)|\\begin\{([a-z]{1,20})\}.{0,300}?\\end\{\1\}"
    r"|(?<![\\$])\$(?![\s$]|\d[\d.,]*(?:\s[^$\n\\]*?[a-zA-Z]{2}|[^$\n]*[-+/*=\s]\$))(?:\\.|[^\n$\\]){1,300}?\$(?!\d)"
)
_VALUE = (
    r"[-−–+±]?\s?(?:[$€£¥₹]?\.?\d|\$|\\[a-zA-Z(\[{$]|[(\[{|（](?![^\W\d_]{2})|[√∛π∞∅½-¾]|(?:sqrt|pi|log|sin|cos|tan)\b"
    r"|[a-zA-Z](?:_\w|\(\w\))?\s?[=<>≤≥^+*/-]|[a-zA-Z](?![\w.'’])(?!\s(?!and\b|or\b)[a-z]{2})|[A-Z]{2,5}\b)"
)
_FILLER = (
    r"(?:[\s:：=“”\"*]|(?i:therefore|thus|then|so|hence|simply|just|exactly|only|approximately|roughly|about|clearly|definitely"
    r"|still|equal\sto|equals|given\sby|as\sfollows|(?:option|choice)(?=\s*\(?[A-Z]\b)|(?:(?:the|an?)\s)?(?:ordered\s)?"
    r"(?:(?:value|total)\sof|set|interval|point|pair|triple|matrix|vector|function|integer|number)(?=\s*[-$\\(\[{\d])"
    r"|not\s[^.;\n]{1,80}?\bbut\b(?:\srather)?)(?![a-zA-Z]),?|不是[^，,。\n]{1,20}[，,]\s*而?是|因此|所以|故|选项(?=[A-Z]))*+"
)
_SIGNS = re.compile(r"(?<!\\)(?:\$|\\[()\[\]])")
_BEGINS = re.compile(_VALUE)
_FILLED = re.compile(_FILLER)
_PROSE = re.compile(rf"(?s){_FORMULA}|\\[a-zA-Z]+|(?P<word>\b(?!(?:and|or|sqrt|pi)\b)[^\W\d_]{{2,}}|[:：](?!\d))")
_TOKEN = re.compile(
    rf"""(?xs){_FORMULA}|(?P<money>(?<!\\)\$)|(?P<end>\n|\.(?!\d)(?!\w\.)|[?;。；？✓✔✅■□]|[!！](?=\s*(?:$|[A-Z一-鿿\n]))
    |[,，]\s*(?!(?:(?:and|or)\s+)?{_VALUE}|\\!|\s|[和或])|\s[—–-]+\s(?=[^\W\d_]{{2}})|(?<=[A-Z])(?:选?项|:(?=\s))
    |\s\((?=(?!mod)[a-z]{{3,}}[\s),']|i\.e)|[,，\s]*(?:\b(?:(?:and|but)\s+)?not\b|而?不是|而非|因为|所以
    |\b(?:because|since|(?<!or\s)so|but|whereas|which|rather\s+than|instead\s+of|altogether|every|each|in\s(?:total|all)
    |an?\s(?:day|week|month|year|hour)|at\sthe(?!\s(?:most|least))|for\s(?:both|each|all)|of\s(?:them|these|those)
    |as\s(?:the|our|my)|(?:left|remaining)(?=\s*(?:[.,;\n]|$|in\b|on\b|for\b))|(?P<context>(?<=[a-z%]\s)(?:old
    |per\s(?:day|week|month|year)|(?:that|who|of|in|on|from|with|at(?!\s(?:most|least))|for|to|between|before|after)(?=\s[a-z]{{2}}))
    |(?<=\d\s)for\s(?=the|his|her|their)))\b))|\\?."""
)
_LEAD = re.compile(
    rf"""(?x)[^\d$\\.?!;\n]*?(?:\b(?:is|are|was|were|that|has|have|had|makes?|made|costs?|needs?|gets?|got|pays?|paid|earns?
    |sold|takes?|took|spent|bought|used|ate)\s|[:：是为有需得共])\s*{_FILLER}(?={_VALUE})"""
)
# What stands before an answer ("the answer is", "Answer:", 答案是, 故选, ####, "Correction:"), and behind it.
_SAYS = re.compile(
    rf"""(?imx)\b(?:answers?|ans|(?:correct|right)\s(?:option|choice))\b(?!\s{{1,9}}(?:choices|options)|>)
    (?:[^\n.:：=?!<>$\d]{{0,60}}?(?:\b(?:is|are|was|be|equals?|becomes|lies)\b|[:：=](?!=))|\s?,(?=\s{{0,9}}[-\d$\\(\[])
    |[^\S\n]{{0,9}}\n(?=\s{{0,9}}[-\d$\\(\[A-Z]))|\b(?:pick|choose|select)\s(?=(?:option\s|choice\s)?\(?(?-i:[A-H]\b))
    |答案】?\s?(?:[应该当就便只能]*(?:[是为选]|[:：=])+|(?=[\s\d$\\(\[（A-Z]|不是))|正确(?:选项|的)?[是为:：]|应该?[是为]
    |[故应]选[择:：]?|选择?\s?(?:[:：]|(?=[A-D]{{1,4}}(?![a-zA-Z])))|^\s{{0,9}}[A答]\s?[:：](?!=)
    |(?:^\s{{0,9}}\#{{4}}|\b(?:correction|no|wait)[,:!]\s(?:(?:it|that)(?:\sis|'s)\s)?|\bactually,?\s(?:it(?:\sis|'s)\s)?
    |\b(?:it|that)\sshould\sbe\s)\s{{0,9}}(?=(?-i:{_VALUE}))"""
)
_SAID = re.compile(
    r"""(?ix)(?:,?\s{0,9}\b(?:and\s)?(?:which|that|this|it))?\s{0,9}(?:\b(?:is|are)\b|[就即便]?不?[是为])\s{0,9}
    (?:\w{1,20}\s{1,9}){0,3}?(?:(?:最终|正确|所求|本题)的?)?(?:answers?\b|答案)(?!\s{0,9}(?:[:：=]|is\b|are\b|[是为]))
    |(?:(?<=\b(?-i:[A-H]))|(?<=\b(?-i:[A-H])\)))\sis\s(?:the\s)?(?:correct|right)\b(?:\s(?:one|option|choice))?"""
)
_SENTENCE = re.compile(r"\n|(?<!\\)[.!](?=\s)|[?;。；？！]")
_CLAUSE = re.compile(rf"(?i){_SENTENCE.pattern}|[,:，：]|\b(?:so|thus|hence|therefore|then|because|since)\b")
# All that may stand before a phrase in its clause; what makes a statement none before it, and behind it.
_PLAINLY = re.compile(
    r"""(?ix)(?:[\W\d]|\b(?:the|an?|our|my|final|correct|right|best|exact|numerical|your|and|but|we|I|you|can|see|find|get
    |conclude|know|think|believe|that|this|which|it|means|implies|shows?|follows|gives|is|in|of|to|for|from|by|conclusion
    |finally|overall|now|here|case|part|answer)\b|[最终正确本题的我们认为可知综上则即得此时所以因故解步骤])*"""
)
_DOUBT = re.compile(
    r"""(?ix)\b(?:not|cannot|never|neither|if|suppos\w+|assum\w+|let|would\s(?:be|say)|could|might|may|false|wrong|incorrect
    |maybe|perhaps|possib\w+|guess\w*|i?s\sno|exceeds|reject\w*|exclud\w*)\b|n't\b|不|假设|如果|若|可能|也许|至[少多]|超过|[大小多少]于|(?:\b(?:least
    |most|than|between|over|under|above|below|up\sto|half|twice|negative|minus|by|from|to|nor|except|but|without|base|modulo
    |(?:roots?|squares?|cube|reciprocal|inverse|opposite|half|multiples?|factors?|out|instead|power|\w+ths?)\sof))\s*$"""
)
_REFUTED = re.compile(
    r"""(?ix)[^\w?？]*(?:right)?[?？吗]|[\W]*(?:(?:but(?!\snot)|however|(?:no\s)?wait|hmm|actually|oops|sorry|hold\son|on\ssecond\sthought
    |I\s(?:disagree|doubt|apologi[sz]e|made\san?)|that\swas\sa\smistake|(?:which|that|this|it)\s(?:isn't|can't)
    |(?:(?:which|that|this|it)(?:'s|\s(?:is|was|seems))\s)?(?:wrong|incorrect|false|impossible
    |not\s(?:right|correct|true)))\b|no[,.:!]|[这那]?是?(?:错|不对)|等等|更正)"""
)
_SUM = re.compile(r"[\s\d.,$\\+*×/÷()−–-]*[\d)]\s*=\s*(?=\\?\$?\d)")
_COUNT = re.compile(
    r"(?i)((?:\\?[$€£¥])?[-−–]?\d[\d,.]*(?:\s?%)?(?:\s+[a-z]+[^suix\W]s\b)?)(?:\s+[^\W\d_][^\d\\=+*/^<>]*)?"
)
_CHANGED = re.compile(
    r"""(?ix)\s(?:[ap]\.?m\b|(?:more|less|fewer|greater)\sthan|(?:or|over\s\d|through|out|divided|multiplied|times|plus|minus
    |point|modulo|mod|base|choose|squared|cubed|factorial|percent|per\scent|halves|half|quarters?|thirds?|dozens?|lakh|crore
    |tens|ones|pairs?|to\sthe|to\s\w+ty|and\s(?:an?|one|two|three)|at\s(?:least|most)|(?:\w*hundred|thousand|\w+illion)s?
    |(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|hundred|\w+teen|\w+tie)ths?)\b)"""
)
"""A sum before the last side of an equation; a number, what is counted and words behind; words that make it another."""
_LABEL = re.compile(
    r"(\(?[A-H]\)|[A-H][.:])\s(?!.*\b(?:[A-H]|is|not|or|and|wrong|incorrect|false)\b)[^\W\d_][^\d\\$=+*/^<>]*"
)
"""The letter of a choice and its words: (B) hyperbola."""
_REFUSED = re.compile(r"(?i)(?:cannot|n't|\bnot|unable\sto)\s(?:\w+\s){0,2}(?:answer|solve|determine|know|sure|help)\b")


def stated_answers(text: str) -> list[str]:
    r"""The answers that a response states, the most explicit first. Rewards and votes take the first one.

    1. The last `\boxed{…}`, or the list of boxes that ends there.
    2. The last `<answer>…</answer>`; the end tag may be missing. One sentence is a statement, more are read as 3 and 4.
    3. The last statement ("the answer is …", "Answer: …", "… is the answer", 答案是…, 故选…, …是答案, `#### …`), up to
       what denies or explains it: "18, not 17" states 18. What is denied, asked or supposed states nothing.
    4. The last expression: the list or equation that ends a sentence, else what math-verify reads there. Words behind a
       number are dropped unless they may change it.

    What is before `</think>` counts only if nothing follows. In a thought that is cut off, only boxes and tags count. A
    response that ends inside its only box states nothing.
    """
    _, closed, spoken = text.rpartition("</think>")
    text = spoken if spoken.strip() else text
    boxed = boxed_answer(text)
    if boxed is None and re.search(r"\\boxed\s*\{", text):
        return []
    plain = _EMPHASIS.sub("", text)
    found = [boxed, _stated(plain) if closed or "<think>" not in text else None]
    for tag in re.findall(r"(?is)<answer>(.*?)(?:</answer>|\Z)", plain)[-1:]:
        found.insert(1, (_stated(tag) if _SENTENCE.search(tag.strip()) else _statement(tag, 0)[0]) or tag)
    return list(dict.fromkeys(each.strip() for each in found if each is not None))


def boxed_answer(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` with balanced braces, or the list of boxes that ends there, with the names
    before them: x=1, y=2 of x=\boxed{1}, y=\boxed{2}. None without a box."""
    boxes = _listed(text)
    if len({content for _, _, content in boxes}) < 2:
        return boxes[0][2] if boxes else None
    named = re.compile(_NAME).search(text, max(0, boxes[0][0] - _REACH), boxes[0][0])
    stops = [named.start(), *(stop for _, stop, _ in boxes)]  # type: ignore[union-attr]
    joined = "".join(text[stop:start] + content for stop, (start, _, content) in zip(stops, boxes, strict=False))
    return _SIGNS.sub("", joined).strip()


def listed_boxes(text: str) -> list[str]:
    """The contents of the boxes that `boxed_answer` joins."""
    return [content for _, _, content in _listed(text)]


def _listed(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of each box of the list that ends with the last box. Takes linear time."""
    opened: list[tuple[int, int]] = []  # for each open brace: start of \boxed, or -1; start of its content
    found: list[tuple[int, int, str]] = []
    for token in _BRACES.finditer(text):
        if token[0] == "{" or token[0].endswith("{") and len(token[0]) > 2:
            opened.append((token.start() if token[0] != "{" else -1, token.end()))
        elif token[0] == "}" and opened:
            boxed, start = opened.pop()
            if boxed >= 0:
                found.append((boxed, token.end(), text[start : token.start()]))
    first = len(found) - 1
    while first > 0 and _BETWEEN.fullmatch(text[found[first - 1][1] : found[first][0]]):
        first -= 1
    return found[max(first, 0) :]


def _stated(text: str) -> str | None:
    """What a text states by a phrase, else in its last sentence with a value. A value goes before words."""
    words = None
    rest = text
    phrases = sorted([*_SAYS.finditer(text), *_SAID.finditer(text)], key=re.Match.end)
    for phrase in phrases[: -_PHRASES - 1 : -1]:
        before = text[max(0, phrase.start() - _REACH) : phrase.start()]
        is_behind = phrase.re is _SAID
        doubted = not (is_behind or _PLAINLY.fullmatch(_CLAUSE.split(before)[-1]))
        value, stop = _statement(text, phrase.end())
        if is_behind:
            value = _statement(_SENTENCE.split(before)[-1], 0)[0]
            stop = phrase.end()
        if doubted or _DOUBT.search(phrase[0]) or _DOUBT.match(value) or _REFUTED.match(text, stop):
            rest = text[stop:]
            if found := _last_expression(rest):
                return found
        elif _BEGINS.match(value) or re.search(r"\d", value):
            return value
        elif value and len(value.split()) < 4:
            words = words or value
    return words or _last_expression(rest)


def _statement(text: str, place: int) -> tuple[str, int]:
    """The statement that begins at a place, without words in front that change nothing, and where it ends."""
    end = place + _REACH
    start = _FILLED.match(text, place, end).end()  # type: ignore[union-attr]
    lead = None if _BEGINS.match(text, start, end) else _LEAD.match(text, start, end)
    return _clause(text, lead.end() if lead and not _DOUBT.search(lead[0]) else start, end)


def _clause(text: str, start: int, end: int = _REACH) -> tuple[str, int]:
    """The text from a place to the end of the statement, without the signs around formulas, and where it ends."""
    found = ""
    depth = 0
    for token in _TOKEN.finditer(text, start, end):
        sign = " " if token["end"] or len(token[0]) > 2 else token[0][-1]
        depth += (sign in "([{（") - (sign in ")]}）")
        if depth < 0 or (token["end"] and not depth and (re.search(r"\d", found) if token["context"] else found)):
            break
        start = token.end()
        found += "\\$" if token["money"] else token[0]
    found = _SIGNS.sub("", found).strip(' \t\n:;,*"“”').rstrip(".,")
    return label[1] if (label := _LABEL.fullmatch(found)) else found, start


def _last_expression(text: str) -> str | None:
    """What the last sentence with a value ends with: a list or an equation, else what math-verify reads."""
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig, get_extraction_regexes  # slow to import

    text = re.sub(
        r"[^.!?？。\n]*[?？]|\((?!mod\b)[a-z]{3,}[\s'][^()]*\)",
        "",
        _PROSE.sub(lambda found: found[0].replace("\n", " "), text[-3 * _REACH :]),
    )
    kinds = get_extraction_regexes((LatexExtractionConfig(), ExprExtractionConfig()))
    patterns = [pattern for patterns, _ in kinds for pattern, priority in patterns if priority == 300]  # of no phrase
    for sentence in [] if _REFUSED.search(text[-_REACH:]) else reversed(_SENTENCE.split(text)):
        start = max((found.end() for found in _PROSE.finditer(sentence) if found.lastgroup), default=0)
        if not _BEGINS.match(sentence, _FILLED.match(sentence, start).end()):  # type: ignore[union-attr]
            found = [(each.end(), -each.start()) for pattern in patterns for each in pattern.finditer(sentence)]
            start = -max(found)[1] if found else len(sentence)
        if start < len(sentence):
            value = _SUM.sub("", _statement(sentence, start)[0], count=1)
            counted = None if _CHANGED.search(value) else _COUNT.fullmatch(value)
            return None if _DOUBT.search(_CLAUSE.split(sentence[:start])[-1]) else counted[1] if counted else value
    return None
