"""From `reward.function` to a callable; runs in the verifier process, not in the launcher: it runs a user's code."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

from engine.errors import BadInput
from engine.reward import verifiers
from engine.types import Prompt, Response

BUILT_IN: dict[str, Callable[..., Any]] = {"math": verifiers.math, "exact": verifiers.exact}
"""Verifiers that are named without a module."""


@dataclass(frozen=True)
class RewardFunction:
    """A reward, ready to be called."""

    spec: str
    """As the config names it."""
    call: Callable[..., Any]
    """(prompt, responses) -> list[float | Score], if `per_response` (prompt, response) -> float | Score; or async."""
    per_response: bool
    file: str
    """Where it is defined; the frame that an error report points to."""


class UserCode:
    """`with UserCode() as attempt:` whatever a user's code raises ends the block and is kept in `attempt.error`.

    A reward may raise anything, and to us that is data (design: reward.on_error); SystemExit still ends the process.
    """

    error: Exception | None = None

    def __enter__(self) -> UserCode:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None


def load_reward(spec: str) -> RewardFunction:
    """Load "math", "exact", "file.py:function" (path as `recipe.find`) or "package.module:function".

    Raises BadInput naming spec, file and the original error.
    """
    if spec in BUILT_IN:
        _warm(spec)
        return _reward(spec, BUILT_IN[spec])
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise BadInput(f'reward.function = "{spec}": expected "math", "exact", "file.py:function" or "module:function"')
    module = _load_file(spec, place) if place.endswith(".py") else _load_module(spec, place)
    if not hasattr(module, name):
        raise BadInput(f'reward.function = "{spec}": {module.__file__} defines no {name}')
    function = getattr(module, name)
    if not callable(function):
        raise BadInput(f'reward.function = "{spec}": {name} in {module.__file__} is {type(function).__name__}, '
                       "expected a function (prompt, responses)")
    return _reward(spec, function, str(module.__file__))


def describe(error: BaseException, file: str = "") -> str:
    """One line: the error's type, message, and the innermost line of `file` (else of any not ours) it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = (__file__, importlib.__file__)
    foreign = [frame for frame in frames if frame.filename not in ours and not frame.filename.startswith("<frozen")]
    own = [frame for frame in foreign if frame.filename == file] or foreign
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own and not isinstance(error, SyntaxError) else ""
    return f"{type(error).__name__}: {error}{where}"


def _reward(spec: str, function: Callable[..., Any], file: str = "") -> RewardFunction:
    code = getattr(inspect.unwrap(function), "__code__", None)
    defined_in = code.co_filename if code is not None else file
    return RewardFunction(spec, function, bool(getattr(function, "per_response", False)), defined_in)


def _warm(spec: str) -> None:
    """Let the verifier import and compile what it needs before the first response is on the clock."""
    prompt = Prompt("", "", "1.0", ())
    BUILT_IN[spec](prompt, Response((), (), (), (), "stop", "\\boxed{1}", 0, ""))


def _load_file(spec: str, place: str) -> ModuleType:
    from engine.recipe import find  # here, not above: Pydantic takes a third of a second, at every start of a worker

    path = find(place)
    if not path.is_file():
        raise BadInput(f'reward.function = "{spec}": no such file: {path}')
    file = path.resolve()
    found = importlib.util.spec_from_file_location(f"metronome_reward_{file.stem}", file)
    if found is None or found.loader is None:
        raise BadInput(f'reward.function = "{spec}": {file} is no Python file')
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses and typing look a class's module up there
    sys.path.append(str(file.parent))  # so that it may import the files beside it
    with UserCode() as attempt:
        found.loader.exec_module(module)
    if attempt.error is not None:
        raise BadInput(f'reward.function = "{spec}": {file} can\'t be loaded: {describe(attempt.error, str(file))}')
    return module


def _load_module(spec: str, name: str) -> ModuleType:
    module: ModuleType | None = None
    with UserCode() as attempt:
        module = importlib.import_module(name)
    if module is None:
        reason = describe(attempt.error) if attempt.error is not None else "it imported nothing"
        raise BadInput(f'reward.function = "{spec}": module {name} can\'t be imported: {reason}')
    return module
