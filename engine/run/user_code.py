"""Loads a user's function, named "file.py:function" or "package.module:function". This runs the user's code."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, TracebackType
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


def find_code(spec: str) -> Path | None:
    """The Python file of a user's function, found without running anything; None if there is none."""
    from engine.config.recipe import find_file

    place = spec.rpartition(":")[0]
    if place.endswith(".py"):
        return _first_file([find_file(place)])
    first, *parts = place.split(".")
    # the latter knows packages that `pip install -e` made known by a finder of its own
    found = PathFinder.find_spec(first, [os.getcwd(), *sys.path]) or importlib.util.find_spec(first)
    if found is None or not parts:
        return _first_file([] if found is None or found.origin is None else [Path(found.origin)])
    modules = [Path(folder).joinpath(*parts) for folder in found.submodule_search_locations or ()]
    return _first_file([file for one in modules for file in (one.with_suffix(".py"), one / "__init__.py")])


def _first_file(places: Iterable[Path]) -> Path | None:
    return next((place.resolve() for place in places if place.is_file()), None)


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
    if not path.is_file():
        raise BadInput(f"{where}: no such file: {path}")
    file = path.resolve()
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
