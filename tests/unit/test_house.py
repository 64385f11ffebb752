"""Rules of the house that import-linter and ruff can't check: where files stand, how long they are, what they name."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("engine", "tasks", "flows", "tests", "benchmarks", "data", "docs")
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
CODE = [file for file in FILES if file.relative_to(ROOT).parts[0] in ("engine", "tasks", "flows")]
LONGEST = 600

PAGES = sorted(file for folder in (ROOT, ROOT / "docs") for file in folder.glob("*.md") if file.name != "CHANGELOG.md")
PAGES += [ROOT / "Makefile"]
PAGES += sorted(file for file in (ROOT / "infra").rglob("*") if file.suffix in (".yaml", ".sh", ".toml"))
DOTTED = re.compile(r"(?<![\w./-])(?:engine|tasks|flows)(?:\.\w+)+")


def place(file):
    """The file's path as it is named in messages."""
    return str(file.relative_to(ROOT))


@cache
def tree(file):
    """The file, parsed."""
    return ast.parse(file.read_text())


def nodes(kind):
    """(file, node) of all nodes of a kind."""
    return ((file, node) for file in FILES for node in ast.walk(tree(file)) if isinstance(node, kind))


def test_no_file_is_too_long_to_read():
    lengths = {place(file): len(file.read_text().splitlines()) for file in FILES}
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_unit_tests_mirror_the_folders():
    rooms = {file.parent.relative_to(ROOT) for file in CODE}
    rooms |= {room.relative_to("engine") for room in rooms if room.parts[0] == "engine" and len(room.parts) > 1}
    folders = {file.parent.relative_to(ROOT / "tests/unit") for file in (ROOT / "tests/unit").rglob("test_*.py")}
    assert sorted(str(folder) for folder in folders - rooms - {Path()}) == []


def test_a_class_name_has_one_meaning():
    places = defaultdict(list)
    for file in CODE:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(place(file))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice == {
        "Platform": ["engine/config/training.py", "engine/platform/base.py"],  # the table, and what it names
        "Step": ["engine/algorithm/alignment.py", "engine/orchestrator/steps.py"],  # a control's argument, public
    }


def texts(file):
    """What people read in a file, and the code that it has in strings: its strings, or the page."""
    if file.suffix != ".py":
        return [file.read_text()]
    strings = (node.value for node in ast.walk(tree(file)) if isinstance(node, ast.Constant))
    return [value for value in strings if isinstance(value, str)]


def exists(name):
    """Whether a dotted name is a module or a folder, or a name that its module's file has."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        folder = ROOT.joinpath(*parts[:length])
        file = folder.with_suffix(".py")
        if file.exists() or folder.is_dir():
            source = (file if file.exists() else folder / "__init__.py").read_text()
            return all(re.search(rf"\b{part}\b", source) for part in parts[length:])
    return False


def test_modules_that_texts_name_are_there():
    named = {(place(file), name) for file in [*FILES, *PAGES] for text in texts(file) for name in DOTTED.findall(text)}
    assert len(named) > 100
    assert sorted(f"{where}: {name}" for where, name in named if not exists(name)) == []


def test_names_that_are_imported_from_us_are_there():
    """In every file, also in those that no other test imports, and that mypy does not read."""
    found = [
        f"{place(file)}:{node.lineno} {node.module}.{name.name}"
        for file, node in nodes(ast.ImportFrom)
        if node.module and node.module.split(".")[0] in ("engine", "tasks", "flows", "support")
        for name in node.names
        if not imported(node.module, name.name)
    ]
    assert found == []


def imported(module, name):
    """Whether a module of ours has a name at its top level, or is a folder with a module of that name."""
    folder = (ROOT / "tests" if module.startswith("support") else ROOT).joinpath(*module.split("."))
    if (folder / f"{name}.py").exists() or (folder / name).is_dir():
        return True
    file = folder.with_suffix(".py") if folder.with_suffix(".py").exists() else folder / "__init__.py"
    return (
        file.exists()
        and re.search(rf"^\s*(?:async def |def |class |from .* |import .*)?\b{name}\b", file.read_text(), re.M)
        is not None
    )
