"""A call in a thread of its own, with its result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_thread(name: str, act: Callable[[], Result]) -> Future[Result]:
    """Begin `act` at once in a thread. The future has its result, or its error of any kind. The process does not wait
    for the thread when it ends."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
