"""Equality of answers as a relation: what is the same, what differs, symmetry and reflexivity, on a corpus and on the
real problem sets."""

import itertools
import json
import os
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.reward.math.equality import same_answer
from support.other_answers import DIFFERENT, NOT_LISTED
from support.same_answers import LISTED, NOT_READ, SAME
from support.spellings import SPELLINGS, bare
from support.verdicts import score

CORPUS = {
    kind: sorted({text for table in (SAME, DIFFERENT) for pair in table[kind] for text in pair if text})
    for kind in SAME
}


@pytest.mark.parametrize("kind", SAME)
def test_spellings_of_one_answer_are_equal_both_ways_and_are_rewarded(kind):
    verdicts = {
        pair: (same_answer(*pair), same_answer(*pair[::-1]), score(pair[0], f"\\boxed{{{pair[1]}}}"))
        for pair in SAME[kind]
    }
    assert {pair: verdict for pair, verdict in verdicts.items() if verdict != (True, True, 1)} == {}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_other_answers_are_equal_in_neither_order_and_are_not_rewarded(kind):
    pairs = DIFFERENT[kind]
    verdicts = {
        pair: (same_answer(*pair), same_answer(*pair[::-1]), score(pair[0], f"\\boxed{{{pair[1]}}}")) for pair in pairs
    }
    assert {pair: verdict for pair, verdict in verdicts.items() if verdict != (False, False, 0)} == {}


def test_spellings_that_few_answers_have_are_refused_in_both_orders():
    assert [pair for pair in NOT_READ if same_answer(*pair) or same_answer(*pair[::-1])] == []


@pytest.mark.parametrize("kind", CORPUS)
def test_equality_is_symmetric_and_reflexive(kind):
    """200 pairs of each kind."""
    assert [text for text in CORPUS[kind] if not same_answer(text, text)] == []
    pairs = list(itertools.combinations(CORPUS[kind], 2))
    drawn = random.Random(kind).sample(pairs, 200)
    assert [pair for pair in drawn if same_answer(*pair) is not same_answer(*pair[::-1])] == []


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([text for texts in CORPUS.values() for text in texts]), st.data())
def test_equality_of_answers_of_different_kinds_is_symmetric(one, data):
    other = data.draw(st.sampled_from([text for texts in CORPUS.values() for text in texts]))
    assert same_answer(one, other) is same_answer(other, one)


TURNED = {"<": ">", r"\le ": r"\ge "}
RATIONALS = st.fractions(max_denominator=10**30).filter(bool)


@settings(max_examples=80, deadline=None)
@given(RATIONALS, RATIONALS, st.integers(1, 400))
def test_fractions_and_powers_are_equal_only_if_their_values_are(one, other, power):
    spelled = [rf"\frac{{{value.numerator}}}{{{value.denominator}}}" for value in (one, other)]
    assert same_answer(*spelled) is (one == other)
    assert same_answer(
        rf"{spelled[0]}\cdot 2^{{-{power}}}", rf"\frac{{{one.numerator}}}{{{one.denominator}\cdot2^{{{power}}}}}"
    )
    assert not same_answer(rf"{spelled[0]}\cdot 2^{{-{power}}}", rf"{spelled[0]}\cdot 2^{{-{power + 1}}}")


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 10**9), st.integers(-40, 40))
def test_a_power_of_ten_is_one_number_in_all_its_spellings(digits, power):
    plain = (
        f"{digits * 10**power}"
        if power >= 0
        else f"{digits:0{1 - power}d}"[:power] + "." + f"{digits:0{-power}d}"[power:]
    )
    for spelled in (
        f"{digits}e{power}",
        f"{digits}E{power:+03d}",
        rf"{digits}\times10^{{{power}}}",
        f"{digits}*10^{power}",
    ):
        assert same_answer(spelled, plain)
        assert same_answer(plain, spelled)
        assert not same_answer(spelled, f"{digits + 1 + digits // 1000}e{power}")


@settings(max_examples=100, deadline=None)
@given(
    st.from_regex(r"\d{1,2}", fullmatch=True),
    st.from_regex(r"\d{0,4}", fullmatch=True),
    st.from_regex(r"\d{1,6}", fullmatch=True),
)
def test_a_repeating_decimal_is_its_fraction(whole, start, period):
    below = 10 ** len(start) * (10 ** len(period) - 1)
    above = int(whole + start + period) - int(whole + start)
    assert same_answer(rf"{whole}.{start}\overline{{{period}}}", rf"\frac{{{above}}}{{{below}}}")
    assert not same_answer(rf"{whole}.{start}\overline{{{period}}}", rf"\frac{{{above + 1}}}{{{below}}}")


ENDS = st.integers(-4, 4)
SIGNS = st.sampled_from([("<", "("), (r"\le ", "[")])
INTERVALS = st.tuples(ENDS, ENDS, SIGNS, SIGNS)


def interval_of(low, high, left, right):
    """With the brackets that belong to the signs on its two sides."""
    return f"{left[1]}{low},{high}{')' if right[1] == '(' else ']'}"


@settings(max_examples=60, deadline=None)
@given(INTERVALS, INTERVALS, st.sampled_from(["且", r"\text{ and }"]), st.data())
def test_two_relations_joined_by_and_are_an_interval_only_if_it_is_theirs(stated, others, word, data):
    low, high, left, right = stated
    pair = [data.draw(st.sampled_from([f"x{TURNED[left[0]]}{low}", f"{low}{left[0]}x"])), f"x{right[0]}{high}"]
    joined = word.join(data.draw(st.permutations(pair)))
    is_set = low < high or (low == high and left[1] == right[1] == "[")
    interval = interval_of(*stated)
    another = interval_of(*others)
    assert same_answer(joined, interval) is same_answer(interval, joined) is is_set
    assert same_answer(joined, f"{low}{left[0]}x{right[0]}{high}") or not is_set
    assert same_answer(joined, another) is (another == interval and is_set)
    assert not same_answer(joined.replace("且", "或").replace("and", "or"), interval)
    assert not same_answer(joined, interval.replace(",", ",9"))


TOKENS = st.sampled_from([*"123456789xnk", r"\pi ", r"\alpha "])


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from([(r"\frac", 2), (r"\binom", 2), (r"\sqrt", 1), (r"\sqrt[3]", 1)]),
    st.lists(TOKENS, min_size=4, max_size=4),
    st.booleans(),
)
def test_arguments_without_braces_are_those_with_braces_and_no_others(command, tokens, spaced):
    name, count = command
    mine = tokens[:count]
    theirs = tokens[-count:]
    terse = name + (" " if spaced or mine[0].isalpha() else "") + (" " if spaced else "").join(mine)
    full, other = (name + "".join(f"{{{one.strip()}}}" for one in each) for each in (mine, theirs))
    assert same_answer(terse, full)
    assert same_answer(full, terse)
    assert same_answer(terse, other) is same_answer(full, other)


@pytest.mark.parametrize(("answer", "text"), LISTED)
def test_boxes_of_one_list_are_the_answer_together(answer, text):
    assert score(answer, text) == 1


@pytest.mark.parametrize(("answer", "text"), NOT_LISTED)
def test_boxes_that_are_another_answer(answer, text):
    assert score(answer, text) == 0


HUGE = [
    r"((2^{999})^{999})^{999}",
    "1e9999",
    r"\frac{1}{x-" * 29 + "1" + "}" * 29,
    r"\sqrt{1+" * 28 + "x" + "}" * 28,
    r"\cos(2^{9999})+\sin(3^{9999})",
    r"\lfloor 10^{9999}\pi\rfloor",
    "(999!)!",
    r"e^{e^{9}}",
    "9^{x9^{9999}}",
    "a^{a^{a^{a}}}",
    r"\alpha" * 200 + "+1=2",
    r"\cup",
    r"\pm",
    r"\frac{d}{di}i^2",
    "{" * 900 + "1" + "}" * 900,
    "1" * 1_900,
    "1" * 100_000,
    "a 1 " * 400,
    r"\sqrt{2024^{2024}+1}",
    "|x" * 40,
    r"\sin^{30}x\cos^{30}y",
]


@pytest.mark.parametrize("answer", HUGE)
def test_large_formulas_take_no_time_as_answer_or_as_response(answer):
    same_answer("7", r"\sqrt{2}")  # loads the library
    started = time.process_time()
    assert same_answer(answer, answer)
    assert not any(same_answer(*pair) for other in ("7", "x+1") for pair in ((answer, other), (other, answer)))
    assert time.process_time() - started < 5


STATED = {  # gold → what responses may say of it
    "113": [
        "m+n=113",
        "m + n = 113",
        "$m+n=100+13=113$",
        "a^2+b^2 = 113",
        "f(1)+f(2)=113",
        r"\frac{a}{b}=113",
        "|a-b|=113",
    ],
    "5": ["2x+z=5", "x^2+y^2=5"],
    r"\frac12": [r"P(A \cap B) = \frac{1}{2}", r"x+y=\frac{2}{4}=0.5"],
}
NOT_STATED = {"25": ["x^2=25", "5x=25", "m+n=24+2=25", "m+n=25=26", "x+y=25, x-y=1"], "x+y=25": ["25"]}


@pytest.mark.parametrize(("gold", "text"), [(gold, text) for gold, texts in STATED.items() for text in texts])
def test_an_equation_states_the_value_of_what_was_asked_for(gold, text):
    assert score(gold, f"\\boxed{{{text}}}") == 1


@pytest.mark.parametrize(("gold", "text"), [(gold, text) for gold, texts in NOT_STATED.items() for text in texts])
def test_an_equation_that_is_to_be_solved_or_contradicts_itself_states_none(gold, text):
    assert score(gold, f"\\boxed{{{text}}}") == 0


HEDGED = [
    r"\text{A}\text{ or }\text{B}",
    r"\textbf{(A)}\text{ or }\textbf{(B)}",
    r"\textbf{(A) or (B)}",
    "(A) or (B)",
    "A. or B.",
    r"\textbf{(A)},\textbf{(B)}",
    r"\text{A},\text{B}",
    r"\text{A}\text{B}",
    r"(A)\text{ is wrong}",
    r"\text{(A)}\ 12\text{ or (B)}\ 13",
    r"\text{A}\text{ and }12",
    "(A)/(C)",
]


@pytest.mark.parametrize("text", HEDGED)
def test_two_letters_are_no_choice(text):
    assert score("A", f"\\boxed{{{text}}}") == 0
    assert not same_answer("A", text)
    assert not same_answer(text, "A")


def test_a_letter_with_its_value_is_a_choice_and_one_with_words_is_none():
    """Words may take it back: (A) is wrong."""
    assert score("A", r"\boxed{\textbf{(A)}\ 12}") == 1
    assert score("A", r"\boxed{\text{(A) heads or tails}}") == 0


@pytest.mark.parametrize(
    "text",
    ["The answer is **42**.", "**Answer: 42**", "So the answer is `42`.", "The **answer** is 42", "Answer: __42__"],
)
def test_markdown_around_an_answer_is_no_part_of_it(text):
    assert score("42", text) == 1


@pytest.mark.parametrize(
    "deep", [r"\log(" * 40 + "10^{10}" + ")" * 40, r"\sin(" * 12 + "x" + ")" * 12, r"\log_{" * 14 + "2" + "}3" * 14]
)
def test_deep_nesting_takes_no_time(deep):
    started = time.process_time()
    assert score("42", f"\\boxed{{{deep}}}") == 0
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "formula", [r"\sum_{k=1}^{10}k", r"\int_0^1 x dx", r"\lim_{x\to 0}\frac{\sin x}{x}", r"\prod_{k=1}^{5}k"]
)
def test_sums_and_integrals_are_never_evaluated(formula):
    """A response could choose one that takes hours."""
    assert score(formula, f"\\boxed{{{formula}}}") == 1.0
    assert not any(same_answer(formula, value) for value in ("55", r"\frac12", "1", "120"))


def test_every_answer_of_the_real_problem_sets_equals_itself_and_its_spellings_both_ways():
    folder = os.environ.get("METRONOME_REAL_DATA")
    if not folder:
        pytest.skip("METRONOME_REAL_DATA is unset: the real problem sets are not part of the project")
    rows = [row for file in sorted(Path(folder).glob("*.json")) for row in json.loads(file.read_text())]
    answers = sorted({str(row["answer"]) for row in rows if row["answer"] is not None and str(row["answer"]).strip()})
    assert len(answers) > 3000
    assert [answer for answer in answers if not same_answer(answer, answer)] == []
    for answer in random.Random(0).sample(answers, 300):
        boxed = [spell(bare(answer)) for spell in SPELLINGS.values() if spell(bare(answer)).startswith("\\boxed{")]
        for spelled in {text[len("\\boxed{") : -1] for text in boxed}:
            assert same_answer(answer, spelled), (answer, spelled)
            assert same_answer(spelled, answer), (answer, spelled)
