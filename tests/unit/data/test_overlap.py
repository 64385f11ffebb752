import itertools
import random
from string import ascii_lowercase

import pytest

from engine.data.prepared import Index, common_length, common_share, problem_words, word_runs
from engine.data.problems import ProblemRow

AIME = (
    "Let $x$, $y$ and $z$ all exceed $1$ and let $w$ be a positive number such that $\\log_x w = 24$, $\\log_y w = 40$ "
    "and $\\log_{xyz} w = 12$. Find $\\log_z w$."
)


def row(problem, where="set.json, row 1"):
    return ProblemRow(problem, "1", {}, where)


def find(training, *evaluation):
    return Index(row(text, f"benchmark, row {n}") for n, text in enumerate(evaluation, 1)).find(row(training))


COPY = AIME.replace("$x$, $y$ and $z$ all", "$ x $, $ y $,  and $z$   ALL").replace("\\log_x w", "{\\log_{x} w}")
EDITED = AIME.replace("Let $x$, $y$ and $z$ all exceed", "Suppose that $x$, $y$ and $z$ are greater than")
ENDING = "can be written as $\\frac{m}{n}$, where $m$ and $n$ are relatively prime positive integers. Find $m+n$."
DICE = f"The probability that six thrown dice show the same number, or five of them show a seven, {ENDING}"
ANGLES = (
    "In a triangle with angles of forty and of sixty degrees the ratio of the longest side to the shortest " + ENDING
)
APPLES = "Tom has {} apples and buys {} more at the market before he gives half of his apples to his sister. How many?"
DRAWING = '[asy] draw((0,0)--(1.5,7)--cycle); label("$A$", (3,4), N); [/asy]'


@pytest.mark.parametrize(
    ("training", "evaluation", "overlaps"),
    [
        (COPY, ["What is 1 + 1?", AIME], True),
        (f"{AIME} Give the answer as a single positive whole number.", [AIME], True),
        (f"{AIME} This was asked in 1983.", [AIME], True),  # a number more is not another number
        (DICE, [ANGLES], False),  # they share a phrase that many problems share
        (EDITED, [AIME], True),
        (EDITED, [AIME] * 32, True),  # however often it stands there, it is no phrase
        (APPLES.format(5, 7), [APPLES.format(5, 9)], False),
        (APPLES.format(5, 7), [APPLES.format(5, 7)], True),
        ("1 + 2 =", ["1+2="], True),
        ("1 + 2 =", ["1 - 2 ="], False),
        ("1+2=", ["12="], False),
        ("", [""], False),
        (f"{AIME} {DRAWING}", [AIME], True),
    ],
)
def test_which_problems_are_the_same(training, evaluation, overlaps):
    found = find(training, *evaluation)
    assert (found is not None) == overlaps
    if training == COPY:
        assert found.other.where == "benchmark, row 2"
        assert found.share > 0.95
    assert word_runs(problem_words(DICE)) & word_runs(problem_words(ANGLES))


def test_thousands_are_the_same_number_with_and_without_separators():
    problem = (
        "How many whole numbers from 1 to {} are divisible by neither seven nor eleven and have an odd sum of digits?"
    )
    for spelled in ("10,000", "10{{,}}000", "10,\\!000", "10\\,000"):
        text = problem.format(spelled.format())
        assert problem_words(text) == problem_words(problem.format("10000"))
        assert find(problem.format("10000"), text) is not None
    words = "1000000 and 1200 or 0 1234 or 2019 2020"
    assert problem_words("1,000,000 and (1,200) or 0,1234 or 2019,2020") == words.split()


@pytest.mark.parametrize("fraction", ["\\frac12 x", "\\dfrac{1}{2}x", "$\\tfrac{1}{2} x$"])
def test_fractions_are_spelled_alike_and_drawings_do_not_count(fraction):
    assert problem_words(f"{fraction} {DRAWING}") == ["frac", "1", "2", "x"]


def slow_common(one, other):
    row_above = [0] * (len(other) + 1)
    for a in one:
        above = row_above
        row_above = [0]
        for n, b in enumerate(other):
            row_above.append(above[n] + 1 if a == b else max(above[n + 1], row_above[n]))
    return row_above[-1]


def test_common_subsequence_by_bits_is_that_of_the_textbook():
    draw = random.Random(0)
    for _ in range(200):
        one, other = (["abcdef"[draw.randrange(6)] for _ in range(draw.randrange(40))] for _ in range(2))
        assert common_length(one, other) == slow_common(one, other)


def test_share_is_of_the_shorter():
    assert common_share(["a", "b"], ["a", "x", "b", "y"]) == 1.0
    assert common_share(["a", "b", "3"], ["a", "b", "4"]) == 0.0


@pytest.mark.parametrize("count", [20, 200])
def test_a_problem_with_a_whole_evaluation_problem_inside_overlaps_however_long_it_is(count):
    more = " ".join(f"{letter}{letter}word" for letter in itertools.islice(itertools.cycle(ascii_lowercase), count))
    for training in (f"{more} {AIME}", f"{AIME} {more}"):
        assert find(training, AIME).share == 1.0
    assert find(AIME, f"{more} {AIME}").share == 1.0
