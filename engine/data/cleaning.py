"""Cleans a problem set: removes duplicates and, for the math verifier, problems whose answer no rule can check or whose
answers contradict each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

from engine.data.problems import ProblemRow, Problems, Rejected, count_reasons, shorten_value
from engine.errors import BadInput
from engine.reward.math.answers import tidy_answer, why_ungradable
from engine.reward.math.equality import same_answer


def clean_problems(problems: Problems, math: bool) -> Problems:
    """The set without duplicate rows.

    With `math`, answers are also unwrapped (`tidy_answer`) and must be checkable, and each problem must have a single
    answer, in any spelling (`equality.same_answer`). Without `math`, an answer may be anything that a user's reward
    reads, so only equal rows are duplicates. Raises BadInput if no row is left.
    """
    rejected = list(problems.rejected)
    rows = list(_gradable(problems.rows, rejected) if math else problems.rows)
    rows = list(_once(rows, rejected, math))
    return with_rows(problems, rows, rejected)


def with_rows(problems: Problems, rows: Iterable[ProblemRow], rejected: Iterable[Rejected]) -> Problems:
    """The set with these rows, and `rejected` added to its rejected rows. Raises BadInput if no row is left."""
    kept = tuple(rows)
    out = tuple(rejected)
    if not kept:
        raise BadInput(f"problem set {problems.source}: no row is left out of {len(out)}; the first: {out[0]}")
    return replace(problems, rows=kept, rejected=out, skipped=count_reasons(out))


def text_key(problem: str) -> str:
    """The text of a problem with normalised blanks, which is the same for two spellings of one problem."""
    return " ".join(problem.split())


def _gradable(rows: Iterable[ProblemRow], rejected: list[Rejected]) -> Iterable[ProblemRow]:
    for row in rows:
        reason = why_ungradable(answer := tidy_answer(row.answer))
        if reason:
            expected = "a number, a formula or a few words, in LaTeX or plain"
            rejected.append(
                Rejected(
                    where=row.where, column="answer", reason=reason, found=shorten_value(row.answer), expected=expected
                )
            )
        else:
            yield row if answer == row.answer else replace(row, answer=answer)


def _once(rows: list[ProblemRow], rejected: list[Rejected], math: bool) -> Iterable[ProblemRow]:
    """Keep the first of equal rows. With `math`, several spellings of one answer are one row, and a problem with
    different answers is dropped."""
    answers: dict[str, dict[str, str]] = {}
    for row in rows:
        answers.setdefault(text_key(row.identity), {}).setdefault(_answer_key(row.answer), row.answer)
    contradicted = {key: found for key, each in answers.items() if math and (found := _different(list(each.values())))}
    first: dict[tuple[str, str], str] = {}
    for row in rows:
        key = text_key(row.identity)
        earlier = first.setdefault((key, "" if math else _answer_key(row.answer)), row.where)
        if key in contradicted:
            rejected.append(
                Rejected(
                    where=row.where,
                    column="answer",
                    reason="contradicted",
                    found=shorten_value(contradicted[key]),
                    expected="one answer for one problem",
                )
            )
        elif earlier != row.where:
            rejected.append(
                Rejected(
                    where=row.where,
                    column="problem",
                    reason="duplicate",
                    found=shorten_value(row.problem),
                    expected=f"each row once; it is {earlier}",
                )
            )
        else:
            yield row


def _different(answers: list[str]) -> str:
    """Two of the answers that differ, as "1 and 2"; empty if all are spellings of one answer."""
    return next((" and ".join(pair) for pair in combinations(answers, 2) if not _same(*pair)), "")


def _same(one: str, other: str) -> bool:
    try:
        return same_answer(one, other)
    except (RecursionError, MemoryError):  # no genuine answer needs this much
        return False


def _answer_key(answer: str) -> str:
    return "".join(answer.split())
