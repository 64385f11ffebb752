"""Loads a user's function, named "file.py:function" or "package.module:function". This runs the user's code.

The processes of a run load the copies in the run folder (`load_copies`): what is edited while a run goes on counts for
the next one.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from engine.errors import LONGEST_TEXT, BadInput, clean_line, cut_text


class UserCode:
    """`with UserCode() as attempt:` stores any error of the user's code in `attempt.error` and ends the block.

    The user's code may raise any error; here an error is data. Exceptions that end a process, such as SystemExit, pass
    through, because they may come from outside. `whatever` stores these as well, for use where they cannot.
    """

    error: BaseException | None = None

    def __init__(self, whatever: bool = False) -> None:
        self._kinds = BaseException if whatever else Exception

    def __enter__(self) -> UserCode:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        self.error = error if isinstance(error, self._kinds) else None
        return self.error is not None


def load_function(key: str, spec: str, expected: str, signature: str) -> tuple[Callable[..., Any], str]:
    """The function that `key = "spec"` names, and its file. The path of a file is looked up as in `recipe.find_file`.

    Raises BadInput naming key, spec, file and the original error. For its messages, `expected` lists the other values
    of the key, and `signature` the arguments of the function.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise BadInput(f'{key} = "{spec}": expected {expected}, "file.py:function" or "module:function"')
    where = f'{key} = "{spec}"'
    module = _load_file(where, place) if place.endswith(".py") else _load_module(where, place)
    if not hasattr(module, name):
        raise BadInput(f"{where}: {module.__file__} defines no {name}")
    function = getattr(module, name)
    if not callable(function):
        raise BadInput(
            f"{where}: {name} in {module.__file__} is {type(function).__name__}, expected a function {signature}"
        )
    return function, str(module.__file__)


def find_code(spec: str) -> list[Path]:
    """The Python files of a user's function, found without running anything: first its own, then those that this one
    imports, itself or through others. Empty if it has none.

    Installed packages are left out, and so are modules that are imported by a computed name.
    """
    from engine.config.recipe import find_file

    place = spec.rpartition(":")[0]
    named = [find_file(place)] if place.endswith(".py") else _files_of(place, [os.getcwd(), *sys.path])
    files = [file.resolve() for file in named if file.is_file()]
    for file in files:
        for name, places in _imports(file, files[0].parent):
            files += [one for one in _files_of(name, places) if one not in files and _is_own(one)]
    return files


def _imports(file: Path, beside: Path) -> Iterator[tuple[str, Sequence[str]]]:
    """The names of the modules that a file imports, and of what it imports from them, with the folders where they are
    looked for. `beside`: the folder of the named file, which is one of them."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):  # loading it will say so
        return
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            level = getattr(node, "level", 0)
            places = (
                [str(file.parents[min(level, len(file.parents)) - 1])]
                if level
                else [os.getcwd(), *sys.path, str(beside)]
            )
            module = getattr(node, "module", None)
            yield from ((f"{module}.{alias.name}" if module else alias.name, places) for alias in node.names)


def _files_of(name: str, places: Sequence[str]) -> list[Path]:
    """The file of a module, and then those of the packages around it."""
    first, *parts = name.split(".")
    found = PathFinder.find_spec(first, places)
    if found is None:
        with contextlib.suppress(ImportError, ValueError):  # raised for modules that no file has made
            found = importlib.util.find_spec(first)  # packages that `pip install -e` made known by a finder of its own
    if found is None:
        return []
    top = [Path(found.origin)] if found.origin is not None else []
    for folder in map(Path, found.submodule_search_locations or ()):
        deeper = [folder.joinpath(*parts[:count]) for count in range(len(parts), 0, -1)]
        top = [*(file for one in deeper for file in (one.with_suffix(".py"), one / "__init__.py")), *top]
    return [file.resolve() for file in top if file.suffix == ".py" and file.is_file()]


def _is_own(file: Path) -> bool:
    """Whether a file belongs to no installed package, to no library of Python and not to Metronome."""
    libraries = (Path(sysconfig.get_path("stdlib")), Path(__file__).parents[1])
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    return not installed and not any(file.is_relative_to(library) for library in libraries)


def copy_of(copies: Path, file: Path) -> Path:
    """Where a folder of copies has the copy of a file: under the file's whole path."""
    return copies / file.relative_to(file.anchor)


_COPIES: list[Path] = []
"""The folder of copies from which this process loads a user's code, if there is one."""


def load_copies(copies: Path | None) -> None:
    """From now on, this process loads each file of a user's code that has a copy in this folder from its copy. The
    code does not notice: `__file__`, and the files beside it, are the original's. None changes nothing."""
    if copies is None:
        return
    kept = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        copy = copy_of(copies, Path(loader.path).resolve())
        # Python keeps no bytecode of a copy, but may have some of the edited file
        return loader.source_to_code(copy.read_bytes(), loader.path) if copy.is_file() else kept(loader, name)

    _COPIES.append(copies)
    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def describe_error(error: BaseException, file: str = "") -> str:
    """One line with the error's type and message, and the innermost traceback line in `file` (otherwise in any file
    outside Metronome)."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = (__file__, importlib.__file__)
    foreign = [frame for frame in frames if frame.filename not in ours and not frame.filename.startswith("<frozen")]
    own = [frame for frame in foreign if frame.filename == file] or foreign
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own and not isinstance(error, SyntaxError) else ""
    return clean_line(f"{type(error).__name__}: {cut_text(str(error), LONGEST_TEXT - 500)}{where}")


def _load_file(where: str, place: str) -> ModuleType:
    # imported here, because Pydantic takes a third of a second at every start of a worker
    from engine.config.recipe import find_file

    path = find_file(place)
    file = path.resolve()
    if not path.is_file():
        raise BadInput(f"{where}: no such file: {path}")
    if _COPIES and not copy_of(_COPIES[-1], file).is_file():
        raise BadInput(f"{where}: {file} is not the code of the run's start, of which {_COPIES[-1]} has copies")
    found = importlib.util.spec_from_file_location(f"metronome_user_{file.stem}", file)
    if found is None or found.loader is None:
        raise BadInput(f"{where}: {file} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses and typing look up a class's module there
    sys.path.append(str(file.parent))  # so that it can import files in its own folder
    with UserCode() as attempt:
        found.loader.exec_module(module)
    if attempt.error is not None:
        raise BadInput(f"{where}: {file} can't be loaded: {describe_error(attempt.error, str(file))}")
    return module


def _load_module(where: str, name: str) -> ModuleType:
    module: ModuleType | None = None
    with UserCode() as attempt:
        module = importlib.import_module(name)
    if module is None:
        reason = describe_error(attempt.error) if attempt.error is not None else "it imported nothing"
        raise BadInput(f"{where}: module {name} can't be imported: {reason}")
    return module
