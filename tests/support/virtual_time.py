"""An event loop whose time passes at once: where all wait, the clock jumps to the next deadline."""

import asyncio
import selectors
from types import SimpleNamespace

from engine.orchestrator.pool import health, instance


class _Jumps(selectors.SelectSelector):
    """Moves its clock instead of waiting."""

    now = 1000.0

    def select(self, timeout=None):
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing will ever happen")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """For what uses neither threads nor sockets."""

    def __init__(self):
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self):
        return self._jumps.now


def virtual(monkeypatch):
    """Let the modules of the pool see virtual time, and use no threads."""

    def now():
        return asyncio.get_running_loop().time()

    async def at_once(act, *arguments):
        return act(*arguments)

    seen = SimpleNamespace(monotonic=now, time=now)
    monkeypatch.setattr(instance, "time", seen)
    monkeypatch.setattr(health, "time", seen)
    monkeypatch.setattr(asyncio, "to_thread", at_once)
