import json
import random
import runpy
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.recipe import HOME
from engine.errors import BadInput
from engine.tools.quickstart_model.addition import column_sums, lessons, read_rows, summands, worked, wrongly_worked

DATA = HOME / "data"
number = st.integers(100, 999)


def load(name):
    return [json.loads(line) for line in (DATA / f"addition_{name}.jsonl").read_text().splitlines()]


def test_generator_reproduces_the_files_that_ship(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["generate_addition.py", str(tmp_path)])
    runpy.run_path(str(DATA / "generate_addition.py"), run_name="__main__")
    for name in ("addition_train.jsonl", "addition_heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_every_row_is_right_and_no_problem_is_in_both_sets():
    train = load("train")
    heldout = load("heldout")
    assert (len(train), len(heldout)) == (4500, 512)
    for row in train + heldout:
        assert row["answer"] == str(sum(summands(row["problem"])))
        assert row["solution"].endswith(f"#{row['answer']}")
    problems = [row["problem"] for row in train + heldout]
    assert len(set(problems)) == len(problems)


def test_worked_by_hand():
    assert worked(315, 849) == "59041;14160;38011#1164"
    assert worked(120, 305) == "05050;20020;13040#425"
    assert worked(315, 849, slip=(0, 3)) == "59030;14050;38011#1153"


@given(number, number)
def test_columns_and_result_agree_with_python(first, second):
    columns, _, result = worked(first, second).partition("#")
    assert int(result) == first + second
    assert [int(line[3]) + 10 * int(line[4]) for line in columns.split(";")] == column_sums(first, second)


@given(number, number, st.integers(0, 2**32))
def test_a_wrong_solution_has_the_right_form_one_wrong_column_and_a_wrong_result(first, second, seed):
    text = wrongly_worked(f"{first}+{second}=", random.Random(seed))
    columns, _, result = text.partition("#")
    lines = [[int(digit) for digit in line] for line in columns.split(";")]
    wrong = [line for line in lines if sum(line[:3]) != line[3] + 10 * line[4]]
    assert len(wrong) == 1
    assert [line[4] for line in lines[:-1]] == [line[2] for line in lines[1:]], "carries must be handed on"
    assert int(result) == sum(line[3] * 10**place for place, line in enumerate(lines)) + 1000 * lines[-1][4]
    assert int(result) != first + second


def test_lessons_are_wrong_in_the_wanted_share_and_repeat_with_the_seed():
    rows = load("train")
    taught = lessons(rows, 0.3, seed=7)
    wrong = sum(solution != row["solution"] for row, (_, solution) in zip(rows, taught, strict=True))
    assert wrong / len(rows) == pytest.approx(0.3, abs=0.03)
    assert taught == lessons(rows, 0.3, seed=7)
    assert taught != lessons(rows, 0.3, seed=8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ('{"problem": "315+849="', "line 1"),
        ('{"problem": "315+849=", "answer": "1164"}', "solution"),
        ('{"problem": "What is 1+1?", "answer": "2", "solution": "2"}', "model.path"),
        ("[1]", "line 1"),
    ],
)
def test_a_file_of_other_things_is_bad_input(tmp_path, text, said):
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(BadInput, match=said):
        read_rows(file)


def test_a_missing_file_is_bad_input(tmp_path):
    with pytest.raises(BadInput, match="no such file"):
        read_rows(tmp_path / "none.jsonl")
