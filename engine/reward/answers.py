"""Gold answers of mathematics as problem sets write them: brought to one form, or refused. Texts only, no SymPy."""

from __future__ import annotations

import ast
import re

LONGEST = 300
"""Characters of an answer that can be checked by rule; the longest of MATH has 159."""
_WORDS = 12
"""Words outside formulas that make an answer prose: nobody writes the same sentence twice."""
_WHOLE = re.compile(r"([+-]?\d+)\.0+")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
_FORMULA = re.compile(r"\\[a-zA-Z]+|\$[^$]*\$")
_PICTURE = re.compile(r"!\[|\[asy\]|\\includegraphics|https?://|\\begin\{(?:tikzpicture|asy)\}")
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def tidy(answer: str) -> str:
    r"""Without what wraps the answer: blanks, `['9.6\n']`, dollar signs; "142.0" becomes "142"."""
    bare = strip_delimiters(_unlisted(answer.strip()))
    whole = _WHOLE.fullmatch(bare)
    return whole[1] if whole else bare


def ungradable(answer: str) -> str:
    """Why no rule can check a response against this answer; empty if one can. What it finds and what would be right."""
    if len(answer) > LONGEST:
        return f"answer of more than {LONGEST} characters"
    if _PICTURE.search(answer):
        return "answer is a picture"
    if len(_WORD.findall(_FORMULA.sub(" ", answer))) > _WORDS:
        return "answer is prose"
    if not any(character.isalnum() for character in answer):
        return "answer has neither letter nor digit"
    return "" if balanced(answer) else "answer has unbalanced braces"


def balanced(latex: str) -> bool:
    r"""Whether every `{` has its `}`; escaped ones don't count."""
    depth = 0
    for token in re.findall(r"\\.|[{}]", latex, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth < 0:
            return False
    return depth == 0


def strip_delimiters(latex: str) -> str:
    """Without blanks and one pair of formula delimiters around."""
    bare = latex.strip()
    for left, right in _DELIMITERS:
        if bare.startswith(left) and bare.endswith(right) and len(bare) > len(left) + len(right):
            inner = bare[len(left) : -len(right)]
            return bare if left in inner.replace("\\$", "") or inner.endswith("\\") else inner.strip()
    return bare


def _unlisted(answer: str) -> str:
    """`['9.6\\n']` → "9.6"; `['1', '2']` → "1, 2".
    A list of Python is how some exports write the texts of an answer."""
    if not (answer.startswith("[") and answer.endswith("]")) or not ("'" in answer or '"' in answer):
        return answer
    try:
        values = ast.literal_eval(answer)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return answer
    if not values or not all(isinstance(value, str) for value in values):
        return answer
    return ", ".join(value.strip() for value in values)
