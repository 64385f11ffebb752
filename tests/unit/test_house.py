"""Rules of the house that import-linter and ruff can't check: where files stand, how long they are, how they read."""

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
MOST_POSITIONAL = 4

BY_PLACE = {
    "takes any number of arguments of one kind": (
        "_hash",
        "boxed",
        "figures",
        "ranks",
        "run",
        "serving",
        "one_of",
        "scores_of",
    ),
    "a kernel of torch, or a shape": ("zeros", "_linear_pointwise", "npu_fusion_attention", "operator", "kernel"),
    "passes its arguments on to a function": ("to_thread", "submit"),
}
"""Functions whose arguments are known by their place, by the reason."""

INHERITED = {"engine/instance/embedded/server.py": {"EngineServer.force_exit", "EngineServer.should_exit"}}
"""Attributes of a library's class, which a class of ours sets."""

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


def only_saves_a_line(node):
    """Whether `a, b = 1, 2` could be two assignments: no value reads what the statement assigns."""
    if len(node.targets) != 1 or not (isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return False
    targets = [ast.unparse(one) for one in node.targets[0].elts]
    read = {ast.unparse(one) for value in node.value.elts for one in ast.walk(value)}
    starred = any(isinstance(one, ast.Starred) for one in (*node.targets[0].elts, *node.value.elts))
    return not starred and not read & set(targets)


def by_place(call):
    """How many arguments a call gives by their place; 0 where their names would say nothing."""
    if any(isinstance(one, ast.Starred) for one in call.args):
        return 0
    name = ast.unparse(call.func).rpartition(".")[2]
    return 0 if any(name in names for names in BY_PLACE.values()) else len(call.args)


def assigned(method):
    """The attributes of its own object that a method assigns."""
    if any(ast.unparse(one) == "staticmethod" for one in method.decorator_list) or not method.args.args:
        return set()
    own = method.args.args[0].arg
    attributes = (node for node in ast.walk(method) if isinstance(node, ast.Attribute))
    return {one.attr for one in attributes if isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == own}


def born_late(node):
    """Attributes that a class's methods assign, but neither its body nor its __init__."""
    has_fields = bool(node.bases) or any("dataclass" in ast.unparse(one) for one in node.decorator_list)
    born = set()
    late = set()
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            born.add(part.name)  # a property has a setter
            (born if part.name in ("__init__", "__post_init__", "__new__") else late).update(assigned(part))
        elif isinstance(part, ast.Assign):
            born |= {ast.unparse(target) for target in part.targets}
        elif isinstance(part, ast.AnnAssign) and (part.value is not None or has_fields):
            born.add(ast.unparse(part.target))
    return late - born


def is_table(file, line):
    """Whether the statement that ends in this line is a literal, or a decorator with one, of at least four lines."""
    for node in ast.walk(tree(file)):
        ends = getattr(node, "end_lineno", None) == line
        if ends and isinstance(node, (ast.List, ast.Tuple, ast.Dict, ast.Set)) and line - node.lineno >= 3:
            return True
    return False


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


def test_attributes_are_born_in_init():
    found = defaultdict(set)
    for file in CODE:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ClassDef) and (late := born_late(node)):
                found[place(file)] |= {f"{node.name}.{name}" for name in late}
    assert found == INHERITED


def test_one_statement_a_line():
    found = [f"{place(file)}:{node.lineno}" for file, node in nodes(ast.Assign) if only_saves_a_line(node)]
    assert found == []


def test_more_than_four_arguments_go_by_keyword():
    found = [
        f"{place(file)}:{node.lineno} {ast.unparse(node.func)}"
        for file, node in nodes(ast.Call)
        if by_place(node) > MOST_POSITIONAL
    ]
    assert found == []


def test_only_tables_keep_a_form_of_their_own():
    mark = "# fmt: " + "skip"
    lines = [
        (file, number)
        for file in FILES
        for number, text in enumerate(file.read_text().splitlines(), 1)
        if text.endswith(mark)
    ]
    assert lines
    assert [f"{place(file)}:{number}" for file, number in lines if not is_table(file, number)] == []


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
