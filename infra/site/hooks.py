"""Hooks of MkDocs: pages of the repository's top folder become pages of the site, and other files that the pages link
to are copied into it, so that each link leads somewhere without the repository."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""File of the top folder → its page."""
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the top folder, and the files that pages link to outside docs/."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    wanted = {target for file in files.documentation_pages() for target in _outside(file)}
    for target in sorted(wanted - PAGES.keys()):
        for path in sorted((ROOT / target).rglob("*")) if (ROOT / target).is_dir() else [ROOT / target]:
            copy = f"files/{path.relative_to(ROOT)}.txt"
            if path.is_file() and "__pycache__" not in path.parts and files.get_file_from_path(copy) is None:
                files.append(File.generated(config, copy, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links outside docs/ to the pages and copies of `on_files`. A folder is a link to its first file."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(found: re.Match[str]) -> str:
        place = _place(page.file, found[2])
        if place.startswith("docs/"):
            there = place.removeprefix("docs/")
        elif place in PAGES:
            there = PAGES[place]
        else:
            copies = sorted(one.src_uri for one in files if one.src_uri.startswith(f"files/{place}"))
            there = copies[0] if copies else found[2]
        return f"{found[1]}{posixpath.relpath(there, folder or '.')}{found[3]}"

    return LINK.sub(replaced, markdown)


def _outside(file: File) -> list[str]:
    """The paths in the repository, outside docs/, to which a page links."""
    places = [_place(file, found[2]) for found in LINK.finditer(file.content_string)]
    return [place for place in places if not place.startswith("docs/") and (ROOT / place).exists()]


def _place(file: File, target: str) -> str:
    """A link's target as a path in the repository."""
    own = next((name for name, page in PAGES.items() if page == file.src_uri), f"docs/{file.src_uri}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(own), target))
