"""A call in a thread of its own, with its result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future


def in_thread(name: str, act: Callable[[], None]) -> Future[None]:
    """Begin `act` at once in a thread. The future has its end, or its error of any kind. The process does not wait for
    the thread when it ends."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
