"""Finds training problems that are also in an evaluation set, copied or edited.

The rule is that of the Qwen2.5 report (arXiv 2412.15115, section 3): a common run of 13 words, and a longest common
subsequence of at least 0.6 of the shorter problem. The run alone would also find phrases such as "where m and n are
relatively prime positive integers". Metronome adds a rule: the numbers of one problem must be among those of the other.
Without it two problems made from one template would count as one. Problems of fewer than 13 words overlap if their
words are equal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.data.problems import ProblemRow

RUN = 13
"""Number of consecutive common words of an overlap."""
PHRASE = 20
"""A run of words in more than this many distinct evaluation problems is a phrase of their template and is ignored."""
SHARE = 0.6
"""Smallest longest common subsequence of an overlap, as a share of the shorter problem's words."""
_WORD = re.compile(r"[a-z]+|\d+(?:\.\d+)?|[+\-*/=<>^]|[^\W\d_]")
_DRAWING = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)
_SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\{,\}|,(?:\\!)?|\\[, ])\d{3})+(?!\d)")
_LAYOUT = frozenset(
    ("left", "right", "text", "mathrm", "textbf", "displaystyle", "quad", "qquad", "mbox", "big", "bigl", "bigr")
)
_SAME = {"dfrac": "frac", "tfrac": "frac", "leq": "le", "geq": "ge", "dots": "ldots", "cdots": "ldots"}


@dataclass(frozen=True)
class Overlap:
    """A training row and the row of an evaluation set that it overlaps with."""

    row: ProblemRow
    other: ProblemRow
    share: float
    """Longest common subsequence as a share of the shorter problem, in words."""


class Index:
    """An index of the problems of evaluation sets, for the comparison with training rows."""

    def __init__(self, rows: Iterable[ProblemRow]) -> None:
        self._whole: dict[tuple[str, ...], int] = {}
        self._rows: list[tuple[ProblemRow, tuple[str, ...]]] = []
        self._runs: dict[tuple[str, ...], list[int]] = {}
        for row in rows:  # each problem once: 32 copies of it in a file do not make its words a phrase
            text = tuple(words(row.problem))
            if text and text not in self._whole:
                self._whole[text] = len(self._rows)
                self._rows.append((row, text))
        for number, (_, text) in enumerate(self._rows):
            for run in runs(text):
                self._runs.setdefault(run, []).append(number)

    def find(self, row: ProblemRow) -> Overlap | None:
        """The evaluation problem with the largest overlap (of several the first); None if there is none."""
        text = tuple(words(row.problem))
        found_runs = (self._runs.get(run, ()) for run in runs(text))
        candidates = {number for numbers in found_runs if len(numbers) <= PHRASE for number in numbers}
        candidates.update({self._whole[text]} if text in self._whole else ())
        found = [(share(text, self._rows[number][1]), -number) for number in candidates]
        best, number = max(found, default=(0.0, 0))
        return Overlap(row, self._rows[-number][0], best) if best >= SHARE else None


def words(problem: str) -> list[str]:
    """Lower-case words, numbers (10,000 as 10000) and operators. LaTeX commands are words; layout and Asymptote are
    left out."""
    text = _THOUSANDS.sub(lambda found: re.sub(r"\D", "", found[0]), _DRAWING.sub(" ", problem).lower())
    text = _SHORT_FRACTION.sub(r" frac \1 \2", text)
    found = _WORD.findall(text)
    return [_SAME.get(word, word) for word in found if word not in _LAYOUT]


def runs(text: Sequence[str]) -> set[tuple[str, ...]]:
    """All runs of 13 words; for a shorter text, the whole text."""
    return {tuple(text[start : start + RUN]) for start in range(max(1, len(text) - RUN + 1))} if text else set()


def share(one: Sequence[str], other: Sequence[str]) -> float:
    """Longest common subsequence over the shorter length; 0 if each has a number that the other lacks."""
    first = _numbers(one)
    second = _numbers(other)
    if not (first <= second or second <= first):
        return 0.0
    return common(one, other) / max(1, min(len(one), len(other)))


def common(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest common subsequence, by bit operations (Hyyrö 2004): one addition of long integers per
    word."""
    places: dict[str, int] = {}
    for index, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << index
    everywhere = row = (1 << len(one)) - 1
    for word in other:
        matched = row & places.get(word, 0)
        row = (row + matched | row - matched) & everywhere
    return len(one) - row.bit_count()


def _numbers(text: Sequence[str]) -> Counter[str]:
    return Counter(word for word in text if word[0].isdigit())
