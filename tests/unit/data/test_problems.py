import datetime
import hashlib
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from engine.data.hub import is_hub_id, rows_of
from engine.data.problems import content_hash, read_problems
from engine.errors import BadInput
from support.s3_server import s3_server

GOOD = {"problem": "1+1=", "answer": "2", "level": 3}


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_array_and_lines_give_the_same_rows(tmp_path):
    rows = [GOOD, {"problem": "2+2=", "answer": 4}]
    array = read_problems(write(tmp_path / "a.json", json.dumps(rows, indent=2)))
    lines = read_problems(write(tmp_path / "b.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n"))
    json_lines = read_problems(write(tmp_path / "c.json", "\n".join(map(json.dumps, rows))))
    assert array.rows == lines.rows == json_lines.rows
    assert [(row.problem, row.answer) for row in array.rows] == [("1+1=", "2"), ("2+2=", "4")]
    assert array.rows[0].columns == GOOD
    assert array.rows[1].columns["answer"] == 4


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answer": "1"}, "no problem"),
        ({"problem": None, "answer": "1"}, "no problem"),
        ({"problem": " \n", "answer": "1"}, "no problem"),
        ({"problem": 5, "answer": "1"}, "problem is a number"),
        ({"problem": "p"}, "no answer"),
        ({"problem": "p", "answer": None}, "no answer"),
        ({"problem": "p", "answer": ""}, "no answer"),
        ({"problem": "p", "answer": float("nan")}, "no answer"),
        ({"problem": "p", "answer": "", "solution": "It is two."}, "no answer"),
        ({"problem": "p", "answer": True}, "answer is a truth value"),
        ({"problem": "p", "answer": ["1"]}, "answer is an array"),
        ({"problem": "p", "answer": {"a": 1}}, "answer is an object"),
        ({"problem": "p \ud800", "answer": "1"}, "not valid Unicode"),
    ],
)
def test_unusable_rows_are_counted_skips(tmp_path, row, reason):
    problems = read_problems(write(tmp_path / "a.jsonl", f"{json.dumps(GOOD)}\n{json.dumps(row)}\n{json.dumps(row)}"))
    assert len(problems.rows) == 1
    assert problems.skipped == {reason: 2}


LINE = json.dumps(GOOD)
REFUSED = {
    "an open object": (
        "a.jsonl",
        f'{LINE}\n\n{{"problem": "p", "answer"\n{LINE}',
        r"line 3, column \d+: not valid JSON",
    ),
    "no JSON": ("a.jsonl", f"{LINE}\n\nnonsense\n{LINE}", r"a\.jsonl, line 3, column \d+: not valid JSON"),
    "a comma too many": ("a.jsonl", f'{LINE}\n\n{{"problem": "p",}}', r"line 3, column \d+: not valid JSON"),
    "two objects": ("a.jsonl", f"{LINE}\n\n{{}} {{}}", r"line 3, column \d+: not valid JSON"),
    "in an array": (
        "a.json",
        '[\n {"problem": "p",\n  "answer": 1},\n {"problem": oops}\n]',
        "line 4, column 14",
    ),
    "a number as a row": ("a.json", "[{}, 3]", "row 2: .* found a number"),
    "a text as a line": ("a.json", '{}\n"x"', "line 2: .* found a text"),
    "other bytes": ("a.jsonl", LINE.encode() + b"\n\xff\xfe\n", "line 2: not valid UTF-8"),
    "digits": ("a.json", '{"problem": "p", "answer": %s}' % ("9" * 5000), r"a\.json, line 1: can't be read"),
    "nesting": ("a.json", "[" * 100_000, r"a\.json, line 1: can't be read"),
    "no Parquet": ("a.parquet", "no parquet", r"a\.parquet: not a readable Parquet file"),
    "another format": ("a.csv", "problem,answer", r"can't read \.csv; expected \.json, \.jsonl, \.parquet"),
    "no row": ("a.json", "[]", "no usable row among 0; expected rows"),
    "nothing": ("a.jsonl", "", "no usable row among 0"),
    "other columns": ("a.jsonl", '{"query": "p"}', "1 × no problem.*the first row has the columns query"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_that_is_no_problem_set_is_refused_with_its_place(tmp_path, what):
    name, content, message = REFUSED[what]
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(BadInput, match=message):
        read_problems(str(tmp_path / name))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{}/absent.json", "no such file or folder"),
        ("{}", "the folder has no"),
        ("gs://bucket/problems.json", r"can't read from gs://; expected a file, a folder, s3://"),
    ],
)
def test_a_path_that_leads_nowhere_is_named(tmp_path, path, message):
    with pytest.raises(BadInput, match=message):
        read_problems(path.format(tmp_path))


def test_neither_a_line_separator_in_a_text_nor_a_byte_order_mark_matters(tmp_path):
    text = json.dumps({"problem": "a\u2028b", "answer": "1"}, ensure_ascii=False)
    assert read_problems(write(tmp_path / "a.jsonl", text)).rows[0].problem == "a\u2028b"
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + json.dumps([GOOD]).encode())
    assert len(read_problems(str(tmp_path / "a.json")).rows) == 1


def test_a_date_of_parquet_is_a_text(tmp_path):
    rows = [{**GOOD, "day": datetime.date(2024, 2, 1)}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read_problems(str(tmp_path / "a.parquet")).rows[0].columns == {**GOOD, "day": "2024-02-01"}


def test_content_hash_is_of_the_contents(tmp_path):
    text = json.dumps(GOOD)
    one = read_problems(write(tmp_path / "a.jsonl", text))
    assert one.content_hash == hashlib.sha256(text.encode()).hexdigest()
    assert read_problems(write(tmp_path / "b.jsonl", text)).content_hash == one.content_hash
    assert read_problems(write(tmp_path / "c.jsonl", text + "\n")).content_hash != one.content_hash
    assert content_hash(write(tmp_path / "d.json", "[broken")) == hashlib.sha256(b"[broken").hexdigest()
    (tmp_path / "d.json").unlink()
    whole = read_problems(str(tmp_path)).content_hash
    assert read_problems(str(tmp_path)).content_hash == whole != one.content_hash


def test_each_rejected_row_says_where_what_and_what_would_be_right(tmp_path):
    text = "\n".join(
        map(json.dumps, [GOOD, {"problem": "p", "answer": ["1"]}, {"problem": 5, "answer": "1"}, {"query": "q"}])
    )
    path = write(tmp_path / "a.jsonl", text)
    problems = read_problems(path)
    assert problems.rows[0].where == f"{path}, line 1"
    assert [str(rejected) for rejected in problems.rejected] == [
        f'{path}, line 2: answer: answer is an array (found ["1"]; expected a string or a number)',
        f"{path}, line 3: problem: problem is a number (found 5; expected a text)",
        f"{path}, line 4: problem: no problem (found the columns query; expected a text)",
    ]


def test_the_split_of_a_hub_dataset_that_names_none():
    import datasets

    one = datasets.Dataset.from_list([GOOD])
    assert rows_of("o/n", datasets.DatasetDict({"only": one}), None) == [("row 1", GOOD)]
    with pytest.raises(BadInput, match="no split train; it has dev, test: give o/n:SPLIT"):
        rows_of("o/n", datasets.DatasetDict({"dev": one, "test": one}), None)  # neither is more likely meant


def test_what_reads_as_a_dataset_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("agentica-org/DeepScaleR-Preview-Dataset")
    assert is_hub_id("HuggingFaceH4/MATH-500:test")
    assert is_hub_id("openai/gsm8k:main/test@refs/convert/parquet")
    assert not any(map(is_hub_id, ["a/b.json", "a/b/c", "s3://a/b", "name", "/a/b", "../a"]))
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert not is_hub_id("a/b")


@pytest.fixture
def bucket():
    """A bucket on a real S3 server in this process."""
    import boto3

    with s3_server():
        client = boto3.client("s3")
        client.create_bucket(Bucket="sets")
        yield lambda key, body: client.put_object(Bucket="sets", Key=key, Body=body)


def test_s3(bucket):
    lines = "\n".join(map(json.dumps, [GOOD, {"problem": "p", "answer": None}]))
    bucket("math/b.jsonl", lines.encode())
    bucket("math/a.json", json.dumps([{"problem": "first", "answer": 1}]).encode())
    bucket("math/README.md", b"no problem set")
    one = read_problems("s3://sets/math/b.jsonl")
    assert one.rows[0].columns == GOOD
    assert one.content_hash == hashlib.sha256(lines.encode()).hexdigest()
    assert one.rejected[0].where == "s3://sets/math/b.jsonl, line 2"
    folder = read_problems("s3://sets/math")
    assert [row.problem for row in folder.rows] == ["first", "1+1="]
    assert folder.source == "s3://sets/math"
    with pytest.raises(BadInput, match="s3://sets/none: no such file or folder on S3"):
        read_problems("s3://sets/none")
    with pytest.raises(BadInput, match="README.md: can't read .md"):
        read_problems("s3://sets/math/README.md")


def test_a_large_file_on_s3_that_is_replaced_while_it_is_read_is_read_whole(bucket, monkeypatch):
    """Parts of it would be of both files, or beyond the end of the shorter one."""
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "default_block_size", 100)
    old, new = ([{"problem": f"{name} {number}", "answer": 1} for number in range(9)] for name in ("old", "new"))
    bucket("rows.jsonl", "\n".join(map(json.dumps, old)).encode())
    ask = s3fs.S3FileSystem._call_s3
    replaced = []

    async def _call_s3(store, method, *arguments, **more):
        if method == "get_object" and not replaced:
            replaced.append(bucket("rows.jsonl", "\n".join(map(json.dumps, new[:2])).encode()))
        return await ask(store, method, *arguments, **more)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", _call_s3)
    assert [row.problem for row in read_problems("s3://sets/rows.jsonl").rows] == ["new 0", "new 1"]


@pytest.mark.parametrize(
    ("name", "rows", "skipped", "first"),
    [
        ("math_train.json", 7470, {"no answer": 4}, "0"),  # two are null, two are empty
        ("amc.json", 83, {}, "142.0"),
        ("aime24.json", 30, {}, "204"),
        ("math500.json", 500, {}, r"\left( 3, \frac{\pi}{2} \right)"),
        ("deepscaler_aime_1983_2023.json", 975, {}, "60"),
    ],
)
def test_real_problem_sets(name, rows, skipped, first):
    folder = os.environ.get("METRONOME_REAL_DATA")
    if not folder:
        pytest.skip("METRONOME_REAL_DATA is unset: the real problem sets are not part of the project")
    problems = read_problems(os.path.join(folder, name))
    assert len(problems.rows) == rows
    assert problems.skipped == skipped
    assert problems.rows[0].answer == first
