"""Three-digit additions with a worked line per column: the quickstart's problems, small enough to be learned in a minute."""

from __future__ import annotations

import random
import re

from engine.errors import BadInput

COLUMNS = 3
"""Digits of each summand; columns are worked from the units upwards."""


def column_sums(first: int, second: int) -> list[int]:
    """Digit + digit + carry of each column, units first; each 0 … 19."""
    sums: list[int] = []
    carry = 0
    for column in range(COLUMNS):
        total = _digit(first, column) + _digit(second, column) + carry
        sums.append(total)
        carry = total // 10
    return sums


def worked(first: int, second: int, slip: tuple[int, int] | None = None) -> str:
    """The addition worked column by column: 315 + 849 gives "5+9+0=41;1+4+1=60;3+8+0=11#1164".

    Each column reads digit + digit + carry = result digit, then the carry to the next column; the result follows "#".
    `slip` = (column, sum) puts a wrong sum (0 … 19) into one column; what follows is consistent with it, so that
    nothing but the arithmetic is wrong.
    """
    lines: list[str] = []
    result, carry = 0, 0
    for column in range(COLUMNS):
        left, right = _digit(first, column), _digit(second, column)
        total = slip[1] if slip is not None and slip[0] == column else left + right + carry
        lines.append(f"{left}+{right}+{carry}={total % 10}{total // 10}")
        result, carry = result + total % 10 * 10**column, total // 10
    return f"{';'.join(lines)}#{result + carry * 10**COLUMNS}"


def wrongly_worked(problem: str, draw: random.Random) -> str:
    """A worked solution of `problem` ("315+849=") with the sum of one random column wrong; raises BadInput on another form."""
    first, second = summands(problem)
    column = draw.randrange(COLUMNS)
    right = column_sums(first, second)[column]
    return worked(first, second, slip=(column, draw.choice([total for total in range(20) if total != right])))


def summands(problem: str) -> tuple[int, int]:
    """The two numbers of "315+849="; raises BadInput when the problem is no such addition."""
    match = re.fullmatch(rf"(\d{{{COLUMNS}}})\+(\d{{{COLUMNS}}})=", problem)
    if match is None:
        raise BadInput(f"problem {problem!r}: the quickstart model is warmed up on additions like '315+849=' only; "
                       "set model.path to a Hugging Face folder to train on other problems")
    return int(match[1]), int(match[2])


def _digit(number: int, column: int) -> int:
    return number // 10**column % 10
