"""The Chinese pages against the English ones: the same headings, code blocks, tables and links."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHINESE = ROOT / "docs/zh"
PAGES = sorted(CHINESE.glob("*.md"))
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`[^`\n]+`")
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)


def english(page):
    """The page of which it is a translation."""
    return ROOT / "README.md" if page.name == "README.md" else ROOT / "docs" / page.name


def parts(page):
    """What a translation keeps."""
    text = page.read_text()
    prose = FENCE.sub("", text)
    return {
        "levels of the headings": [len(level) for level, _ in HEADING.findall(prose)],
        "code blocks": FENCE.findall(text),
        "rows of tables": sum(line.lstrip().startswith("|") for line in prose.splitlines()),
        "links": sorted(filter(None, (linked(page, target) for target in LINK.findall(prose)))),
    }


def linked(page, target):
    """The English page or the file to which a link leads, as a path in the repository; "" within the page."""
    path = target.partition("#")[0]
    if re.match(r"[a-z]+:", target):
        return target
    place = Path(os.path.normpath(page.parent / path)) if path else page
    if place.is_relative_to(CHINESE):
        place = english(place)
    return "" if place == (english(page) if page.is_relative_to(CHINESE) else page) else str(place.relative_to(ROOT))


def anchors(page):
    headings = [title for _, title in HEADING.findall(FENCE.sub("", page.read_text()))]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_a_translation_says_what_the_english_page_says(page):
    ours = parts(page)
    theirs = parts(english(page))
    for what in theirs:
        assert ours[what] == theirs[what], f"docs/zh/{page.name}: {what}"


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_somewhere(page):
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if target.startswith("https:"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_it_is_chinese_and_there_are_pages():
    assert len(PAGES) == 3
    for page in PAGES:
        text = CODE.sub("", FENCE.sub("", page.read_text()))
        assert len(re.findall(r"[\u4e00-\u9fff]", text)) > 200, page.name
