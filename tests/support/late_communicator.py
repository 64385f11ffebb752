"""Groups over gloo that behave as those of NCCL and HCCL: the members get their communicator late."""

import threading
import time

from engine.wire.weights.backends import BACKENDS, DeviceBackend, Gloo


class Late(DeviceBackend):
    """A backend whose groups make their communicator in the first broadcast, which blocks until all members have
    called theirs. That has no deadline, as with NCCL.

    `eager`: `eager_connect_single_device` makes it too (NCCL's); else that does nothing (HCCL's).
    `dies`: rank of a member that never takes part. An abort does not end the making, as NCCL's and HCCL's does not.
    """

    device = "cpu"

    def __init__(self, eager=True, dies=None):
        self.eager = eager
        self.dies = dies
        self.over = threading.Event()
        """The end of the test: nothing blocks any longer."""
        self.made = []

    def make(self, place):
        self.made.append(LateGroup(self, place, Gloo().make(place)))
        return self.made[-1]

    def abort(self, group):
        group.abort()


class LateGroup:
    def __init__(self, backend, place, gloo):
        self._backend = backend
        self._place = place
        self._gloo = gloo
        self._lock = threading.Lock()
        self.connected = False
        self.aborted = threading.Event()
        self.device = None

    def eager_connect_single_device(self, device):
        self.device = device
        if self._backend.eager:
            self._communicator()

    def broadcast(self, piece, root):
        self._communicator()
        return self._gloo.broadcast(piece, root)

    def abort(self):
        self.aborted.set()

    def _communicator(self):
        with self._lock:
            if self.connected:
                return
            if self._place.rank != self._backend.dies:
                self._place.store.add("members", 1)
            while self._place.store.add("members", 0) < self._place.world:
                if self._backend.over.is_set():
                    raise RuntimeError("the communicator was aborted")
                time.sleep(0.005)
            self.connected = True


def late(monkeypatch, **settings):
    """For a fixture: transport "late" is there; yields it."""
    backend = Late(**settings)
    monkeypatch.setitem(BACKENDS, "late", backend)
    yield backend
    backend.over.set()
