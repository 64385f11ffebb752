import dataclasses

import pytest

from engine.config.inputs import Reward
from engine.data.prepared import clean_problems, split_position, split_problems
from engine.data.problems import ProblemRow, Problems
from engine.errors import BadInput

MATH, EXACT, OWN = (Reward(function=name) for name in ("math", "exact", "mine.py:reward"))


def problems(*rows):
    pairs = [{"problem": text, "answer": answer} for text, answer in rows]
    made = [ProblemRow(row["problem"], row["answer"], row, f"set.json, row {n}") for n, row in enumerate(pairs, 1)]
    return Problems(tuple(made), {}, "set.json", "hash")


def test_the_first_of_equal_rows_stays_with_the_place_of_the_other_named():
    found = clean_problems(problems(("1 + 1 =", "2"), ("3 + 1 =", "4"), ("1 +  1\n=", " 2")), OWN)
    assert [row.where for row in found.rows] == ["set.json, row 1", "set.json, row 2"]
    assert found.skipped == {"duplicate": 1}
    assert str(found.rejected[0]) == (
        'set.json, row 3: problem: duplicate (found "1 +  1\\n="; expected each row once; it is set.json, row 1)'
    )


@pytest.mark.parametrize(
    ("reward", "answers", "kept", "reason"),
    [
        (MATH, ("2", "3"), 0, "contradicted"),
        (MATH, ("2", "2.0"), 1, "duplicate"),
        (MATH, ("5 1/2", "51/2"), 0, "contradicted"),
        (EXACT, ("2", "2.0"), 0, "contradicted"),
        (EXACT, ("2", " 2\n"), 1, "duplicate"),
        (EXACT, ("1 2", "12"), 0, "contradicted"),
        (OWN, ("2", "3"), 2, ""),  # a user's reward may read more than the answer
        (OWN, ("2", " 2"), 1, "duplicate"),
    ],
)
def test_one_problem_with_two_answers_is_trusted_in_neither(reward, answers, kept, reason):
    found = clean_problems(problems(("1 + 1 =", answers[0]), ("b", "1"), ("1 +  1\n=", answers[1])), reward)
    assert [row.problem for row in found.rows] == (["1 + 1 ="] * (kept > 0) + ["b"] + ["1 +  1\n="] * (kept > 1))
    assert found.skipped == ({reason: 2 - kept} if reason else {})


@pytest.mark.parametrize(
    ("given", "tidy"),
    [
        ("142.0", "142"),
        ("['9.6\\n']", "9.6"),
        ("['1', '2']", "1, 2"),
        (" $\\frac{1}{2}$ ", "\\frac{1}{2}"),
        ("-4.0", "-4"),
        ("[1, 2]", "[1, 2]"),
        ("2.50", "2.50"),
        ("\\$5", "\\$5"),
        ("$1$ or $2$", "$1$ or $2$"),
        ("025", "025"),
    ],
)
def test_answers_are_unwrapped_and_columns_are_left(given, tidy):
    row = clean_problems(problems(("p", given)), MATH).rows[0]
    assert (row.answer, row.columns["answer"]) == (tidy, given)
    assert clean_problems(problems(("p", given)), OWN).rows[0].answer == given


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("9" * 301, "answer of more than 300 characters"),
        ("![figure](https://example.org/a.png)", "answer is a picture"),
        (
            "Let us suppose the contrary and then see that there must always be some prime number below it",
            "answer is prose",
        ),
        ("\\frac{1}{2", "answer has unbalanced braces"),
        ("}a{", "answer has unbalanced braces"),
        ("---", "answer has neither letter nor digit"),
    ],
)
def test_answers_that_no_rule_can_check(answer, reason):
    found = clean_problems(problems(("p", answer), ("q", "1")), MATH)
    assert [row.problem for row in found.rows] == ["q"]
    assert found.skipped == {reason: 1}
    assert found.rejected[0].column == "answer"
    assert len(clean_problems(problems(("p", answer)), OWN).rows) == 1


def test_a_brace_that_is_shown_needs_no_other():
    system = "\\left\\{ \\begin{array}{l} x = 1 \\\\ y = 2 \\end{array} \\right."
    assert clean_problems(problems(("p", system)), MATH).rows[0].answer == system


def test_nothing_left_names_the_first_reason():
    with pytest.raises(
        BadInput, match=r"no row is left out of 1; the first: set\.json, row 1: answer: answer is a picture"
    ):
        clean_problems(problems(("p", "![a]")), MATH)


def many(count, start=0):
    return problems(*((f"problem {n}", str(n)) for n in range(start, start + count)))


def test_a_split_follows_the_problem_and_nothing_else():
    train, heldout = split_problems(many(2000), 0.1)
    held = {row.problem for row in heldout.rows}
    assert not held & {row.problem for row in train.rows}
    assert len(train.rows) + len(heldout.rows) == 2000
    assert 150 < len(heldout.rows) < 250  # 200 ± 3.7 standard deviations of 13.4
    more = many(3000)
    shuffled = dataclasses.replace(more, rows=more.rows[::-1])
    kept = {row.problem for row in split_problems(shuffled, 0.1)[1].rows if int(row.answer) < 2000}
    assert kept == held
    assert {row.problem for row in split_problems(many(2000), 0.2)[1].rows} > held


def test_rows_of_one_problem_fall_on_one_side():
    assert split_position("1 +  1\n=") == split_position("1 + 1 =") != split_position("1 + 1 = ?")
    assert 0 <= split_position("") < 1


def test_a_split_with_an_empty_side_is_refused():
    with pytest.raises(BadInput, match="puts all 1 rows on one side"):
        split_problems(many(1), 0.5)
