import html

import pytest
from markdown_it import MarkdownIt

from tasks.tracking.artifact_cells import code_span, format_cell, table_as_markdown


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
        ("0123456789abcdef" * 4, "0123456789ab…"),  # its column is narrow
    ],
)
def test_a_value_as_people_read_it(value, text):
    assert format_cell(value) == text


EVIL = "a|b `c` [d](javascript:e) <img src=x onerror=f>\n| forged | row |\x1b[2J"


def rendered(text):
    """The page that a viewer of Markdown with HTML and tables makes of it."""
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(text)


def test_a_text_in_a_table_stays_one_cell_and_plain():
    page = rendered(table_as_markdown({"note": EVIL, "avg": "0.5 [0.1, 0.9]"}))
    assert page.count("<tr>") == 3
    assert page.count("<td>") == 4
    assert "[d](javascript:e) &lt;img src=x" in page
    assert "0.5 [0.1, 0.9]" in page
    assert not any(tag in page for tag in ("<a", "<img", "<code", "\x1b"))


@pytest.mark.parametrize("text", ["my model", "a`b", "``x`", EVIL.replace("\n", "").replace("\x1b", "")])
def test_a_code_span_holds_the_whole_text(text):
    page = rendered(f"Trains {code_span(text)} on it")
    assert page == f"<p>Trains <code>{html.escape(text)}</code> on it</p>\n"
