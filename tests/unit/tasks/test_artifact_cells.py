import pytest

from tasks.artifact_cells import format_cell, table_as_markdown, table_rows


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.23923142078443352, "0.2392"),
        (1.0013580322265625e-05, "1.001e-05"),
        (123456.7, "123,457"),
        (1017600, "1,017,600"),
        (True, "yes"),
        (None, "none"),
        ({}, "none"),
        ({"too long": 3, "no answer": 0.25}, "too long: 3, no answer: 0.25"),
        ([1, 2.5], "1, 2.5"),
        ("runs/a", "runs/a"),
    ],
)
def test_a_value_as_people_read_it(value, text):
    assert format_cell(value) == text


def test_tables():
    assert table_rows({"avg_at_k": 0.5}) == [{"figure": "avg at k", "value": "0.5"}]
    assert table_as_markdown({"peak_bytes": 401203200, "note": "a|b"}).splitlines() == [
        "| | |",
        "|---|---|",
        "| peak bytes | 401,203,200 |",
        "| note | a\\|b |",
    ]
