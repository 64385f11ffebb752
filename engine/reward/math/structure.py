"""Splits a canonical answer into parts: entries of brackets and lists, ends of an interval, the letter of a choice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_ASSIGNED = re.compile(r"([a-zA-Z](?:_\{?\w\}?)?(?:\([a-z]\))?)=(?=.)")
NAME = re.compile(
    r"(?!(?:e|i|\\pi ?)$)(?:[a-zA-Z|']|\\(?!frac|sqrt|cdot|pm|cup|pi(?![a-z])|infty|emptyset)[a-zA-Z]++ ?"
    r"|\\text\{[^{}]*\}|\\[{}]|_(?:\\?\w|\{[^{}]*\})|\^\{-1\}(?=\()|(?<=[a-zA-Z}'])\([^()=]*\)|\{[a-zA-Z]+\}|\\frac\{d[a-z]?\}\{d[a-z]\})++"
)
"""Names to which a value can be given: x, x_1, f(x), f(2), AB, |AB|, \\angle ABC, \\text{Area}. No arithmetic, no
constant."""
_OPTION = re.compile(
    r"(?:(\\text\{)\(?([A-Z])[).:]?\}\)?|(\\text\{)\(([A-Z])\)(?=[^}]*\})|\(([A-Z])\)|([A-Z])(?:[).]|$))(.*)",
    re.DOTALL,
)
HEDGE = re.compile(
    r"^\W*(?:or|and|(?:is )?(?:not|wrong|incorrect|false))(?![a-zA-Z])|(?:^|or|and|,|;|/)\W*\(?[A-Z]\)?\W*$|\([A-Z]\)"
)
"""Text after the letter of a choice that makes it no choice: "or B", "(B)", "is wrong"."""
RELATION = re.compile(r"(\\(?:le|ge)(?![a-z])|<|>)")
TURNED = {"\\le": "\\ge", "\\ge": "\\le", "<": ">", ">": "<"}
AND = re.compile(r",?\s*\\text\{,? ?(and|or)\}\s*|;")


def split_parts(text: str, *separators: str) -> list[str]:
    """The parts between separators that are outside brackets; the text itself if there are no separators."""
    parts = []
    depth = 0
    start = 0
    for token in re.finditer(r"\\(?:cup|approx|in)(?![a-zA-Z])|\\.|[()\[\]{},:=+]", text, re.DOTALL):
        if token[0] in separators and depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
        depth += (token[0] in ("(", "[", "{", "\\{")) - (token[0] in (")", "]", "}", "\\}"))
    return [part for part in [*parts, text[start:]] if part] or [text]


def bracketed_entries(text: str) -> tuple[str, list[str]] | None:
    """Kind and entries of a bracketed text that has a comma, or of a set; None for anything else, such as (a + 1)(b,
    c)."""
    for left, right in (("(", ")"), ("[", "]"), ("(", "]"), ("[", ")"), ("\\{", "\\}")):
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            inner = text[len(left) : -len(right)]
            parts = split_parts(inner, ",")
            if is_closed(inner) and (len(parts) > 1 or left == "\\{"):
                return left + right, parts
    return None


def is_closed(inner: str) -> bool:
    """Whether no bracket inside closes one that was opened outside."""
    depth = 0
    for token in re.finditer(r"\\[{}]|[()\[\]{}]", inner):
        depth += 1 if token[0] in ("(", "[", "{", "\\{") else -1
        if depth < 0:
            return False
    return depth == 0


def split_choice(text: str) -> tuple[str, str]:
    """The letter of a choice and what follows it; two empty texts if there is no letter."""
    match = _OPTION.fullmatch(text)
    if match is None:
        return "", ""
    letter = match[2] or match[4] or match[5] or match[6]
    rest = f"\\text{{{match[7]}" if match[3] else match[7]
    is_text = match[1] or match[3]
    if not is_text and re.match(r"[-+*/^_=(]|\\(?:cdot|in|cup)|.*(?:,|[.:]\D)", rest):
        return "", ""
    return letter, rest


class Range(NamedTuple):
    """The name, brackets and ends that a relation of one variable, or an interval, states."""

    name: str
    brackets: str
    ends: list[str]


def read_interval(text: str) -> Range:
    """The interval that a text states, either directly or as a relation; without ends if it states none."""
    nothing = Range("", "", [])
    parts = [part.strip() for part in RELATION.split(text)]
    if len(parts) == 1:
        found = bracketed_entries(text)
        return Range("", *found) if found and len(found[1]) == 2 and found[0] != "\\{\\}" else nothing
    if "\\le" not in parts and "<" not in parts:
        parts = [TURNED.get(part, part) for part in reversed(parts)]
    if len(parts) == 3 and not NAME.fullmatch(parts[2]):
        parts = ["-\\infty", "<", *parts]
    elif len(parts) == 3:
        parts = [*parts, "<", "\\infty"]
    if len(parts) != 5 or not NAME.fullmatch(parts[2]) or not {parts[1], parts[3]} <= {"<", "\\le"}:
        return nothing
    return Range(parts[2], ("(" if parts[1] == "<" else "[") + (")" if parts[3] == "<" else "]"), parts[::4])


def chain_of(text: str) -> str:
    r"""The chain that two relations joined by "and" state: 1 < x < 3 for x > 1 \text{and} x < 3. Empty if they do not
    meet in a common side."""
    left, word, right = parts if len(parts := AND.split(text)) == 3 else ("", "", "")
    chains = [_ascending(side) for side in (left, right)]
    if word != "and" or not all(chains) or is_list(left) or is_list(right):
        return ""
    for first, second in (chains, chains[::-1]):
        if first[-1] == second[0]:
            return "".join(f"{part} " if part.startswith("\\") else part for part in (*first, *second[1:]))
    return ""


def _ascending(text: str) -> list[str]:
    """Sides and signs of a chain of relations, from the smallest side; empty if it is none."""
    parts = [part.strip() for part in RELATION.split(text)]
    if parts[1:2] in (["\\ge"], [">"]):
        parts = [TURNED.get(part, part) for part in reversed(parts)]
    return parts if len(parts) > 1 and all(parts) and {*parts[1::2]} <= {"<", "\\le"} else []


class Listed(NamedTuple):
    """The entries of a list, the words between them ("and", "or"), and the name given to them."""

    name: str
    joined: set[str]
    entries: list[str]


def read_list(text: str) -> Listed:
    r"""The list in a text. It has a name only if x = stands before the first entry and no other. 1 \pm 2 is two
    entries."""
    sets = bracketed_entries(text)
    is_set = sets is not None and sets[0] == "\\{\\}"
    joined = set() if is_set else set(filter(None, AND.findall(text)))
    parts = sets[1] if sets and is_set else split_parts(AND.sub(",", text), ",")
    name = ""
    if len(parts) > 1 and (match := _ASSIGNED.match(parts[0])) and not any("=" in part for part in parts[1:]):
        name, parts = match[1], [parts[0][match.end() :], *parts[1:]]
    return Listed(name, joined if len(parts) > 1 else set(), _spread(parts))


def _spread(parts: Sequence[str]) -> list[str]:
    r"""The parts, with a \pm b replaced by a + b and a - b."""
    pairs = [[part.replace("\\pm", sign) for sign in "+-"] if part.count("\\pm") == 1 else [part] for part in parts]
    return [entry.lstrip("+") for pair in pairs for entry in pair]


def is_list(text: str) -> bool:
    """Whether a text is a list: in `x = 1, y = 2` each entry is an equation."""
    return len(split_parts(AND.sub(",", text), ",")) > 1
