"""What files of a problem set hold in other programs' ways, and what of them can be answered."""

import json
import re
from decimal import Decimal

import datasets
import msgspec
import numpy
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.inputs import Reward
from engine.data.hub import rows_of
from engine.data.prepared import clean_problems
from engine.data.problem_files import File, parse_file, spell_value
from engine.data.problems import read_problems
from engine.errors import BadInput
from engine.reward.verifiers import math
from engine.types import Prompt, Response


def reward(gold, text):
    response = Response(
        token_ids=(), logprobs=(), versions=(), loss_mask=(), finish_reason="stop", text=text, seed=0, instance=""
    )
    return math(Prompt("", "", gold, ()), response).value


def parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def answers(path):
    return [row.answer for row in read_problems(str(path)).rows]


@pytest.mark.parametrize(
    ("literal", "answer"),
    [
        ("0.00001", "0.00001"),
        ("1e16", "10000000000000000"),
        ("0.000015", "0.000015"),
        ("1E+2", "100"),
        ("142.0", "142.0"),
        ("-2.5e-7", "-0.00000025"),
        ("3.14159265358979323846", "3.14159265358979323846"),
        ("100000000000000000000001", "100000000000000000000001"),
        ("0", "0"),
        ('"142.0"', "142.0"),
        ('" 7 "', " 7 "),
    ],
)
def test_an_answer_of_a_json_file_is_spelled_as_there_without_an_exponent(tmp_path, literal, answer):
    (tmp_path / "a.jsonl").write_text(f'{{"problem": "p", "answer": {literal}}}')
    (row,) = read_problems(str(tmp_path / "a.jsonl")).rows
    assert row.answer == answer
    assert json.loads(json.dumps(row.columns["answer"])) == json.loads(literal)
    assert reward(row.answer, rf"The answer is $\boxed{{{answer}}}$.") == 1


NUMBERS = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e100, max_value=1e100)
LONG = st.integers(-(2**63), 2**63 - 1)
COLUMNS = {  # the kind of a column: the values that it can hold, and their plain spelling
    "JSON int": (st.integers(-(10**40), 10**40), None, str),
    "JSON float": (NUMBERS, None, lambda value: format(Decimal(repr(value)), "f")),
    "JSON string": (st.one_of(st.integers().map(str), st.decimals(-9, 9, places=9).map("{:f}".format)), None, str),
    "double": (NUMBERS, pyarrow.float64(), lambda value: format(Decimal(repr(value)), "f")),
    "float": (
        st.floats(-(2.0**99), 2.0**99, width=32),
        pyarrow.float32(),
        lambda value: numpy.format_float_positional(numpy.float32(value)),
    ),
    "half": (
        st.floats(-60000, 60000, width=16).map(numpy.float16),
        pyarrow.float16(),
        numpy.format_float_positional,
    ),
    "decimal": (st.decimals(-(10**20), 10**20, places=12), pyarrow.decimal128(38, 12), "{:f}".format),
    "int64": (LONG, pyarrow.int64(), str),
    "string": (LONG.map(str), pyarrow.string(), str),
    "large_string": (LONG.map(str), pyarrow.large_string(), str),
}


@pytest.mark.parametrize("kind", COLUMNS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_can_be_read_is_reached_by_its_plain_spelling(kind, data):
    values, column, spelling = COLUMNS[kind]
    chosen = data.draw(st.lists(values, min_size=1, max_size=8))
    if column is None:
        file = File("a.json", json.dumps([{"answer": value} for value in chosen]).encode())
    else:
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.table({"answer": pyarrow.array(chosen, column)}), sink)
        file = File("a.parquet", sink.getvalue().to_pybytes())
    for value, (_, row) in zip(chosen, parse_file(file), strict=True):
        read = spell_value(row["answer"])
        assert re.fullmatch(r"-?\d+(\.\d+)?", read)
        assert Decimal(read) == Decimal(spelling(value))
        assert reward(read, rf"so \boxed{{{spelling(value)}}}") == 1


@pytest.mark.parametrize(
    ("literal", "reason"),
    [
        ("Infinity", "answer is not a finite number"),
        ("-Infinity", "answer is not a finite number"),
        ("NaN", "no answer"),
        ("1e400", "answer is beyond a double"),
        ("-1e999999999", "answer is beyond a double"),
        ("1e-400", "answer is beyond a double"),
    ],
)
def test_numbers_that_are_none_are_refused_by_row(tmp_path, literal, reason):
    (tmp_path / "a.jsonl").write_text(
        f'{{"problem": "p", "answer": 1}}\n{{"problem": "p", "answer": {literal}}}\n{{"problem": "q", "answer": 0e-9}}'
    )
    found = read_problems(str(tmp_path / "a.jsonl"))
    assert [row.answer for row in found.rows] == ["1", "0.000000000"]
    assert [(row.where.rpartition(", ")[2], row.reason, row.found) for row in found.rejected] == [
        ("line 2", reason, literal)
    ]
    infinite = parquet(tmp_path / "a.parquet", problem=["p", "q"], answer=[1.5, float("inf")])
    assert read_problems(infinite).skipped == {"answer is not a finite number": 1}


PICTURE = b"\x89PNG\r\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image", PICTURE),
        ("images", [PICTURE]),
        ("image", {"bytes": PICTURE, "path": None}),
        ("answer", PICTURE),
        ("problem", PICTURE),
    ],
)
def test_bytes_are_refused_by_row_and_are_never_a_text(tmp_path, name, value):
    rows = [{"problem": "p", "answer": "1"} | {name: value}]
    path = parquet(tmp_path / "a.parquet", **{key: [row[key] for row in rows] for key in rows[0]})
    with pytest.raises(BadInput, match=r"no usable row among 1 \(1 × .*bytes\)"):
        read_problems(path)
    if name.startswith("image"):  # null where a problem has no picture
        table = pyarrow.Table.from_pylist([*rows, {"problem": "q", "answer": "2", name: None}])
        pyarrow.parquet.write_table(table, path)
        found = read_problems(path)
        assert [row.problem for row in found.rows] == ["q"]
        assert str(found.rejected[0]).startswith(f"{path}, row 1: {name}: bytes (found ")
        assert "PNG" not in str(found.rejected[0])


def test_pictures_and_short_floats_of_the_hub_are_those_of_files(tmp_path):
    from PIL import Image

    features = datasets.Features(
        {"problem": datasets.Value("string"), "answer": datasets.Value("float32"), "image": datasets.Image()}
    )
    rows = {"problem": ["p", "q"], "answer": [0.1, 0.2], "image": [Image.new("RGB", (1, 1)), None]}
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, features=features)})
    (_, first), (_, second) = rows_of("o/n", splits, None)
    assert (first["answer"], second["answer"], second["image"]) == (0.1, 0.2, None)
    assert list(first["image"]["bytes"]) == ["unreadable bytes"]


def test_hidden_files_are_no_part_of_a_folder_and_folders_in_it_are(tmp_path):
    good = '{"problem": "%s", "answer": 1}'
    for name in ("b.JSONL", "part/split=train/0.jsonl", "a.json", "part/split=test/0.Json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(good % name)
    for name in ("._a.jsonl", ".hidden.jsonl", "__MACOSX/a.json", ".git/a.json", "part/_delta_log/0.json", "a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"\x00\x05\xff")
    (tmp_path / "part" / "loop").symlink_to(tmp_path)
    expected = ["a.json", "b.JSONL", "part/split=test/0.Json", "part/split=train/0.jsonl"]
    found = read_problems(str(tmp_path))
    assert ([row.problem for row in found.rows], found.source) == (expected, str(tmp_path))
    assert [row.problem for row in read_problems(str(tmp_path / "b.JSONL")).rows] == ["b.JSONL"]
    hidden = tmp_path / ".cache"  # which a user names
    (hidden / "x").mkdir(parents=True)
    parquet(hidden / "x" / "U.PARQUET", problem=["p"], answer=[1])
    assert answers(hidden) == ["1"]


def test_a_column_that_occurs_twice_is_named(tmp_path):
    columns = [pyarrow.array([value]) for value in "p12"]
    table = pyarrow.table(columns, ["problem", "answer", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=r"a\.parquet: column answer occurs twice"):
        read_problems(str(tmp_path / "a.parquet"))
    row = '{"problem": "p", "answer": 1}'
    twice = '{"problem": "p", "answer": 1, "answer": 2}'
    for text, where in ((f"{row}\n{twice}", "line 2"), (f"[{row},\n{twice}]", "row 2")):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(BadInput, match=rf"a\.json, {where}: column answer occurs twice"):
            read_problems(str(tmp_path / "a.json"))


def test_one_answer_in_several_spellings_is_one_row(tmp_path):
    spellings = ["0.5", "1/2", r"\frac12", r"\frac{1}{2}", r"\dfrac{1}{2}", r"$\frac{1}{2}$", ".5", "0.50", r"50\%"]
    rows = [{"problem": "P", "answer": answer} for answer in spellings]
    rows += [{"problem": "Q", "answer": "1"}, {"problem": " Q ", "answer": "2"}, {"problem": "Q", "answer": "1.0"}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    found = clean_problems(read_problems(str(tmp_path / "a.json")), Reward(function="math"))
    assert [(row.problem, row.answer) for row in found.rows] == [("P", "0.5")]
    assert found.skipped == {"duplicate": 8, "contradicted": 3}
    assert "1 and 2" in next(str(row) for row in found.rejected if row.reason == "contradicted")


def test_numbers_of_a_row_can_be_sent_to_a_program(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text('{"problem": "a", "answer": 0.5, "level": 1e-05, "more": {"parts": [0.25]}}\n')
    (row,) = read_problems(str(path)).rows
    assert (row.answer, row.columns["level"]) == ("0.5", 1e-05)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(row.columns)) == row.columns
