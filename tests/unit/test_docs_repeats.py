"""No fact stands on two pages of the documentation: no equal sentence, and no equal row of a table."""

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SENTENCE = 8  # words: shorter ones, such as "Not run by this project", may stand anywhere
ROW = 4
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^\s*(?:[-*]|\d+\.|#+)\s")
RULE = re.compile(r"^\s*\|[-| :]+\|\s*$")


def shown(text: str) -> str:
    """The text with the words of its links, and without images."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text))


def words_of(text: str) -> str:
    """The words in lower case with single spaces, without markup and without punctuation around them."""
    stripped = (word.strip(".,;:!?()[]\"'_") for word in re.sub(r"[`*|]", " ", text).lower().split())
    return " ".join(word for word in stripped if word)


def blocks(lines: list[str]) -> Iterator[str]:
    """Paragraphs, list items and headings as one line each, and every cell of a table."""
    block: list[str] = []
    for line in [*lines, ""]:
        if block and (not line.strip() or line.lstrip().startswith("|") or BLOCK.match(line)):
            yield " ".join(block)
            block = []
        if line.lstrip().startswith("|"):
            yield from re.split(r"(?<!\\)\|", line)
        elif line.strip():
            block.append(BLOCK.sub("", line))


def rows(lines: list[str]) -> Iterator[str]:
    """The rows of tables, without their heads."""
    for line, below in pairwise([*lines, ""]):
        if line.lstrip().startswith("|") and not RULE.match(line) and not RULE.match(below):
            yield line


def statements(text: str) -> set[str]:
    """What a page says, code blocks aside: its sentences of at least SENTENCE words and table rows of at least ROW."""
    lines = shown(FENCE.sub("", text)).splitlines()
    sentences = {words_of(part) for block in blocks(lines) for part in re.split(r"(?<=[.!?:;])\s+", block)}
    long = {sentence for sentence in sentences if len(sentence.split()) >= SENTENCE}
    return long | {row for row in map(words_of, rows(lines)) if len(row.split()) >= ROW}


def repeated(pages: dict[str, str]) -> list[str]:
    """`statement (page, page)` for every statement that stands on several of the pages (name: text)."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, text in pages.items():
        for statement in statements(text):
            found[statement].append(name)
    return sorted(f"{statement} ({', '.join(names)})" for statement, names in found.items() if len(names) > 1)


ONE = """# One

Rows pass through here. A weight version is the number of
steps so far, [counted](two.md) from **0**. Short sentences may stand twice.

| key | meaning |
|---|---|
| `a.b` | three words here |
| `c.d` | It is the longest time in seconds of one single call. |
"""


def test_a_sentence_on_two_pages_is_found_however_it_is_wrapped_and_marked():
    two = "- `A weight version` is the number of steps so far, counted from 0.\n\nShort sentences may stand twice.\n"
    assert repeated({"one": ONE, "two": two}) == [
        "a weight version is the number of steps so far counted from 0 (one, two)"
    ]


def test_a_row_on_two_pages_is_found_and_the_head_of_a_table_is_not():
    two = "| key | meaning |\n|---|---|\n| a.b | three words  here |\n"
    assert repeated({"one": ONE, "two": two}) == ["a.b three words here (one, two)"]


def test_a_sentence_is_found_in_a_cell():
    two = "In short: it is the longest time in seconds of one single call.\n"
    assert repeated({"one": ONE, "two": two}) == ["it is the longest time in seconds of one single call (one, two)"]


def test_code_blocks_and_different_texts_may_repeat_nothing():
    code = "```\nmetronome run --set a.b=1 --set a.c=2 # this is a comment of eight words\n```\n"
    other = "Another page has other sentences with other words in it."
    assert repeated({"one": ONE + code, "two": code, "three": other}) == []


def test_no_statement_stands_on_two_pages():
    assert len(PAGES) > 25
    assert repeated({str(page.relative_to(ROOT)): page.read_text() for page in PAGES}) == []
