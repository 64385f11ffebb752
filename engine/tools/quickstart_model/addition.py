"""Three-digit additions worked column by column: the quickstart's problems, which a small model learns in a minute."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from engine.errors import BadInput

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


def wrongly_worked(problem: str, draw: random.Random) -> str:
    """A worked solution of `problem` with a wrong sum in one random column. Raises BadInput like `summands`."""
    first, second = summands(problem)
    column = draw.randrange(COLUMNS)
    right = column_sums(first, second)[column]
    return worked(first, second, slip=(column, draw.choice([total for total in range(20) if total != right])))


def summands(problem: str) -> tuple[int, int]:
    """The two numbers of a problem such as "315+849=". Raises BadInput for any other problem."""
    match = re.fullmatch(rf"(\d{{{COLUMNS}}})\+(\d{{{COLUMNS}}})=", problem)
    if match is None:
        raise BadInput(
            f"problem {problem!r}: the quickstart model is warmed up on additions like '315+849=' only; "
            "set model.path to a Hugging Face folder to train on other problems"
        )
    return int(match[1]), int(match[2])


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows (problem, answer, solution) of a JSON Lines file of additions. Raises BadInput naming the wrong line."""
    if not path.is_file():
        raise BadInput(f"{path}: no such file; the quickstart model is warmed up on data/addition_train.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines:
        raise BadInput(f"{path}: empty; expected one addition a line")
    return [_row(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def lessons(rows: list[dict[str, str]], wrong_share: float, seed: int) -> list[tuple[str, str]]:
    """(problem, solution) of each row. A share `wrong_share` of the solutions has a wrong sum in one column."""
    draw = random.Random(seed)
    return [
        (row["problem"], wrongly_worked(row["problem"], draw) if draw.random() < wrong_share else row["solution"])
        for row in rows
    ]


def _row(line: str, where: str) -> dict[str, str]:
    try:
        row = json.loads(line)
        summands(row["problem"])
        return {name: row[name] for name in ("problem", "answer", "solution")}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise BadInput(f"{where}: {error!r}; expected a JSON object with problem, answer and solution") from None
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


def _digit(number: int, column: int) -> int:
    return number // 10**column % 10
