"""Converts the gold answers of mathematical problem sets to one form, or rejects them. Works on text, without SymPy."""

from __future__ import annotations

import ast
import re

from engine.reward.math.canonical import is_closed, strip_delimiters

LONGEST = 300
"""Largest number of characters in an answer that a rule can check; the longest in MATH has 159."""
_WORDS = 12
"""Largest number of words outside formulas. A longer answer is prose, which no response repeats word for word."""
_WHOLE = re.compile(r"([+-]?\d+)\.0+")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
_FORMULA = re.compile(r"\\[a-zA-Z]+|\$[^$]*\$")
_PICTURE = re.compile(r"!\[|\[asy\]|\\includegraphics|https?://|\\begin\{(?:tikzpicture|asy)\}")


def tidy_answer(answer: str) -> str:
    r"""The answer without surrounding blanks, `['…']` and dollar signs; "142.0" becomes "142"."""
    bare = strip_delimiters(_unlisted(answer.strip()))
    whole = _WHOLE.fullmatch(bare)
    return whole[1] if whole else bare


def why_ungradable(answer: str) -> str:
    """Why no rule can check a response against this answer; empty if a rule can."""
    if len(answer) > LONGEST:
        return f"answer of more than {LONGEST} characters"
    if _PICTURE.search(answer):
        return "answer is a picture"
    if len(_WORD.findall(_FORMULA.sub(" ", answer))) > _WORDS:
        return "answer is prose"
    if not any(character.isalnum() or character in "∅∞" for character in answer):
        return "answer has neither letter nor digit"
    return "" if is_closed(re.sub(r"\\.", "", answer), "[{}]") else "answer has unbalanced braces"


def _unlisted(answer: str) -> str:
    """`['9.6\\n']` → "9.6"; `['1', '2']` → "1, 2". Some exports write the answer as a Python list of texts."""
    if not (answer.startswith("[") and answer.endswith("]")) or not ("'" in answer or '"' in answer):
        return answer
    try:
        values = ast.literal_eval(answer)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return answer
    if not values or not all(isinstance(value, str) for value in values):
        return answer
    return ", ".join(value.strip() for value in values)
