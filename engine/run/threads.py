"""Runs a call in a separate thread and returns its result as a future."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_thread(name: str, act: Callable[[], Result]) -> Future[Result]:
    """Start `act` in a new thread. The future gets its result, or any exception that it raises. The process does not
    wait for the thread when it exits."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:  # noqa: BLE001 - the caller of result() gets it
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
