"""Holds problems out of training by their content, so that adding, removing or reordering rows moves no other row."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from engine.data.cleaning import text_key
from engine.data.problems import ProblemRow, Problems
from engine.errors import BadInput


def split(problems: Problems, fraction: float) -> tuple[Problems, Problems]:
    """Training rows and held-out rows, both in order. A row is held out with probability `fraction` (0 < fraction < 1).

    The hash of the problem's text without blanks decides, so all rows of one problem are on the same side. Raises
    BadInput if a side is empty.
    """
    sides: dict[bool, list[ProblemRow]] = {True: [], False: []}
    for row in problems.rows:
        sides[place(row.problem) < fraction].append(row)
    if not sides[True] or not sides[False]:
        raise BadInput(
            f"problem set {problems.source}: data.heldout_fraction = {fraction:g} puts all {len(problems.rows)} "
            "rows on one side; give another fraction, more rows, or a held-out file in data.heldout"
        )
    heldout = Problems(tuple(sides[True]), {}, f"{problems.source} (held out {fraction:g})", problems.content_hash)
    return replace(problems, rows=tuple(sides[False])), heldout


def place(problem: str) -> float:
    """A number in [0, 1) for a problem: 53 bits of SHA-256 of its text."""
    digest = hashlib.sha256(text_key(problem).encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53
