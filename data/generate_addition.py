"""Writes the problem sets of quickstart.toml and calculator.toml, the same bytes each time: `python
data/generate_addition.py [FOLDER]`.

A problem of the quickstart is a three-digit addition, its solution the addition worked column by column. One of the
calculator is a product of three-digit numbers, its answer the product's last three digits.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SEED = 2025
TRAIN_ROWS = 4_500
HELDOUT_ROWS = 512
PRODUCTS_TRAIN = 2_000
PRODUCTS_HELDOUT = 256
COLUMNS = 3
"""Number of digits of each summand. Columns are worked from the units upwards."""


def column_sums(first: int, second: int) -> list[int]:
    """The sum digit + digit + carry of each column, units first; each is 0 … 19."""
    sums: list[int] = []
    carry = 0
    for column in range(COLUMNS):
        total = _digit(first, column) + _digit(second, column) + carry
        sums.append(total)
        carry = total // 10
    return sums


def worked(first: int, second: int, slip: tuple[int, int] | None = None) -> str:
    """The addition worked column by column: 315 + 849 gives "59041;14160;38011#1164".

    A column has five digits: its two digits and the carry into it, then the result digit and the carry out of it. The
    result follows "#". (In the spelling "5+9+0=41" learning takes half as long again.) `slip` = (column, sum) puts a
    wrong sum (0 … 19) into one column. The rest is consistent with it, so only this sum is wrong.
    """
    lines: list[str] = []
    result = 0
    carry = 0
    for column in range(COLUMNS):
        left = _digit(first, column)
        right = _digit(second, column)
        total = slip[1] if slip is not None and slip[0] == column else left + right + carry
        lines.append(f"{left}{right}{carry}{total % 10}{total // 10}")
        result = result + total % 10 * 10**column
        carry = total // 10
    return f"{';'.join(lines)}#{result + carry * 10**COLUMNS}"


def rows() -> list[dict[str, str]]:
    """All additions in DeepScaleR's schema (problem, answer, solution), no problem twice; the held-out ones come
    last."""
    pairs = _pairs(TRAIN_ROWS + HELDOUT_ROWS)
    return [{"problem": f"{a}+{b}=", "answer": str(a + b), "solution": worked(a, b)} for a, b in pairs]


def products() -> list[dict[str, str]]:
    """All products, no problem twice; the held-out ones come last."""
    pairs = _pairs(PRODUCTS_TRAIN + PRODUCTS_HELDOUT)
    return [{"problem": f"{a}x{b}=", "answer": f"{a * b % 1000:03}"} for a, b in pairs]


def write(folder: Path) -> None:
    """Write the train and heldout file of each set into `folder`."""
    for name, everything, train in (("addition", rows(), TRAIN_ROWS), ("products", products(), PRODUCTS_TRAIN)):
        for part, chosen in (("train", everything[:train]), ("heldout", everything[train:])):
            text = "".join(f"{json.dumps(row)}\n" for row in chosen)
            (folder / f"{name}_{part}.jsonl").write_text(text, encoding="utf-8", newline="\n")


def _pairs(count: int) -> list[tuple[int, int]]:
    draw = random.Random(SEED)
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < count:
        pairs[draw.randint(100, 999), draw.randint(100, 999)] = None
    return list(pairs)


def _digit(number: int, column: int) -> int:
    return number // 10**column % 10


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
