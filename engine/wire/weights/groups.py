"""Broadcast groups of a pipeline stage's sender and all instances (torch.distributed; needs torch only, not vLLM).

The sender is rank 0 and has a TCPStore, in which the other members find it. The members meet in the store, with a
deadline, before the group is created. So if a member dies before, the others do not hang in the group's constructor,
which cannot be cancelled. Every wait in a group has a deadline, and `close` cancels it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import BadInput, DeadlineError, TransferError
from engine.wire.address import address_towards
from engine.wire.store import serve_store

BACKENDS = ("gloo", "nccl")
REACH_S = 10.0
"""Time limit in seconds to reach the sender. The sender listens before its address is sent, so more time would not
help."""
POLL_S = 0.0005
"""Seconds between two looks at a running transfer. A bucket takes hundreds of times longer."""


class Rendezvous:
    """The sender's store, in which the members of its stage's group find each other."""

    def __init__(self, host: str, backend: str, timeout_s: float) -> None:
        """`host`: an address of this machine that the instances can reach. A free port is used."""
        self.host = host
        self._backend = backend
        self._timeout_s = timeout_s
        self._store = serve_store(host, timeout_s)
        self._off = threading.Event()

    @property
    def port(self) -> int:
        """Port of the store."""
        return self._store.port

    @property
    def address(self) -> dict[str, str | int]:
        """Host and port of the store, for the members."""
        return {"host": self.host, "port": self.port}

    def gather(self, world: int) -> BroadcastGroup:
        """Wait for the members (ranks 1 … world − 1) and create the group. Raises TransferError if it is called off,
        and DeadlineError."""
        try:
            with _store_errors("the members of the weight transfer"):
                for rank in range(1, world):
                    _await_key(
                        store=self._store,
                        key=f"here/{rank}",
                        timeout_s=self._timeout_s,
                        off=self._off,
                        what=f"rank {rank} of the weight transfer",
                    )
                self._store.set("go", "1")
                return BroadcastGroup(
                    store=self._store,
                    rank=0,
                    world=world,
                    backend=self._backend,
                    own=self.host,
                    timeout_s=self._timeout_s,
                )
        except (DeadlineError, TransferError):
            self._store.set("off", "1")
            raise

    def call_off(self) -> None:
        """Cancel the group: no member waits any longer. Members that come later also get TransferError, as long as this
        object exists."""
        self._off.set()
        self._store.set("off", "1")


def join(
    address: dict[str, object], rank: int, world: int, backend: str, timeout_s: float, off: threading.Event
) -> BroadcastGroup:
    """Become a member of the group that a `Rendezvous` gathers. Raises TransferError if the sender or `off` cancels it,
    and DeadlineError."""
    host = address.get("host")
    port = address.get("port")
    if not isinstance(host, str) or type(port) is not int or not 0 < port < 65536:
        raise BadInput(f'init_info.stages: {address!r} is not an address; expected {{"host": ..., "port": ...}}')
    with _store_errors(f"the sender of the weights at {host}:{port}"):
        _await_port(host, port, timeout_s, off)
        store = dist.TCPStore(
            host_name=host,
            port=port,
            world_size=None,
            is_master=False,
            timeout=timedelta(seconds=min(timeout_s, REACH_S)),
        )
        store.set_timeout(timedelta(seconds=timeout_s))
        store.set(f"here/{rank}", "1")
        _await_key(
            store=store,
            key="go",
            timeout_s=timeout_s,
            off=off,
            what=f"the sender of the weights at {host}:{port} and the other members",
        )
        return BroadcastGroup(
            store=store, rank=rank, world=world, backend=backend, own=address_towards(host), timeout_s=timeout_s
        )


@contextlib.contextmanager
def _store_errors(whom: str) -> Iterator[None]:
    """Turn torch's errors of stores and rendezvous, which are all RuntimeErrors, into TransferError."""
    try:
        yield
    except RuntimeError as error:
        raise TransferError(f"no connection with {whom}: {str(error).splitlines()[0]}") from None


def _await_key(store: dist.Store, key: str, timeout_s: float, off: threading.Event, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not store.check([key]):
        if off.is_set() or store.check(["off"]):
            raise TransferError(f"the weight transfer was called off while it waited for {what}")
        if time.monotonic() > deadline:
            raise DeadlineError(f"{what} did not come within {timeout_s:g} s")
        time.sleep(0.005)


def _await_port(host: str, port: int, timeout_s: float, off: threading.Event) -> None:
    """Wait until a process listens there. (torch's own wait cannot be cancelled.)"""
    deadline = time.monotonic() + min(timeout_s, REACH_S)
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError as error:
            reason = error
        if off.is_set():
            raise TransferError(f"the weight transfer was called off while it looked for its sender at {host}:{port}")
        if time.monotonic() > deadline:
            raise TransferError(f"the sender of the weights at {host}:{port} can't be reached: {reason}")
        time.sleep(0.02)


def own_address(loopback: bool) -> str:
    """An address of this machine that the instances can reach; 127.0.0.1 if all of them are on this machine."""
    if loopback:
        return "127.0.0.1"
    found = socket.gethostbyname(socket.gethostname())
    if ipaddress.ip_address(found).is_loopback:
        raise BadInput(
            f"the name of this machine, {socket.gethostname()}, means {found}: instances on other machines can't "
            "reach that; set the machine's own address in /etc/hosts"
        )
    return found


class BroadcastGroup:
    """A stage's sender (rank 0) and receivers."""

    def __init__(self, store: dist.Store, rank: int, world: int, backend: str, own: str, timeout_s: float) -> None:
        """`own`: the address of this machine that the others use. All members call this at the same time."""
        self.backend = backend
        self._timeout_s = timeout_s
        self._store = store  # keeps the sender's store alive as long as the group
        self._made: dist.ProcessGroup | None = _make(
            store=store, rank=rank, world=world, backend=backend, own=own, timeout_s=timeout_s
        )
        self.device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        """Device of the receivers' buffers: that of the thread that joined. (Other threads would start with device
        0.)"""
        self._last: list[dist.Work] = []
        self._closed = threading.Event()

    def broadcast(self, *pieces: Tensor) -> Transfer:
        """Start to send (rank 0) or receive pieces of memory. They are contiguous, with the same sizes on all
        members."""
        if self._made is None:
            raise TransferError("the weight transfer was closed")
        made = self._made
        self._last = [made.broadcast(piece, 0) for piece in pieces]
        return Transfer(self._last, self._closed, self._timeout_s)

    def close(self) -> None:
        """Leave the group. Waits of this process in the group raise TransferError at once; other members notice
        later."""
        self._closed.set()
        made = self._made
        self._made = None
        if made is None:
            return
        if self.backend == "nccl":
            made.abort()
        threading.Thread(target=_let_go, args=([*self._last, made],), name="leave-group", daemon=True).start()
        self._last = []


def _let_go(held: list[Any]) -> None:
    """Delete [running transfers …, group] after the transfers have ended by their time-out. (gloo would wait for them
    with the interpreter locked.)"""
    while not all(work.is_completed() for work in held[:-1]):
        time.sleep(0.05)
    held.clear()


def _make(store: dist.Store, rank: int, world: int, backend: str, own: str, timeout_s: float) -> dist.ProcessGroup:
    wait = timedelta(seconds=timeout_s)
    place = dist.PrefixStore("group", store)
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
        options._timeout = wait
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
        # the stubs say that a backend is no group and has no broadcast
        return dist.ProcessGroupGloo(place, rank, world, options)  # type: ignore[return-value]
    if backend == "nccl":
        if not torch.cuda.is_available():
            raise BadInput("transport nccl: this process sees no CUDA device; use gloo or file")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = wait
        return dist.ProcessGroupNCCL(place, rank, world, options)  # type: ignore[return-value]  # as above
    raise BadInput(f"transport {backend!r}: expected one of {', '.join(BACKENDS)}")


class Transfer:
    """Running broadcasts."""

    def __init__(self, works: list[dist.Work], closed: threading.Event, timeout_s: float) -> None:
        self._works = works
        self._closed = closed
        self._timeout_s = timeout_s

    def wait(self) -> None:
        """Wait until the bytes have arrived. Raises TransferError if a member died or the group was closed, and
        DeadlineError."""
        deadline = time.monotonic() + self._timeout_s
        while not all(work.is_completed() for work in self._works):
            if self._closed.is_set():
                raise TransferError("the weight transfer was closed while a bucket was under way")
            if time.monotonic() > deadline:
                raise DeadlineError(f"a bucket of weights was not through within {self._timeout_s:g} s")
            time.sleep(POLL_S)
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise TransferError(f"a member of the weight transfer failed: {str(error).splitlines()[0]}") from None
