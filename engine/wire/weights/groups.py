"""Broadcast groups of a pipeline stage's sender and all instances (torch.distributed; needs only torch, not vLLM).

The sender is rank 0 and serves a TCPStore, in which the other members find it. The members meet in the store before the
group is created, so a missing member can be named. Then every member creates and connects its group in a thread,
because that blocks until all members do the same. Every wait has a deadline, and `close` and `call_off` cancel it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import BadInput, DeadlineError, TransferError
from engine.run.process import in_thread
from engine.wire.address import address_towards, reachable_host
from engine.wire.weights.backends import BACKENDS, POLL_S, GroupBackend, Membership, group_device, use_device

HOST = torch.device("cpu")
REACH_S = 10.0
"""Seconds to reach the sender. The sender listens before its address is sent, so more time would not help."""
LOOK_S = 0.005
"""Seconds between two checks of the store."""


def serve_store(host: str, timeout_s: float, port: int = 0) -> dist.TCPStore:
    """Return a store that listens on this address only; port 0 means any free port. Raises OSError if it can't.

    By default torch would listen on all addresses, and spend seconds on resolving the names of mapped addresses.
    """
    listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return dist.TCPStore(
        host_name=host,
        port=int(listening.getsockname()[1]),
        world_size=None,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


class Rendezvous:
    """The sender's store, in which the members of its stage's group find each other."""

    def __init__(self, host: str, backend: str, timeout_s: float, device: torch.device = HOST) -> None:
        """`host`: an address of this machine that the instances can reach. A free port is used. `device`: device of the
        sender's model. Raises BadInput if the backend can't send from there."""
        self.host = host
        self._backend = backend
        self._timeout_s = timeout_s
        self._device = group_device(backend, device)
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
        """Wait for the members (ranks 1 … world − 1) and create the group. Raises TransferError if the group is called
        off, and DeadlineError."""
        with _store_errors("the members of the weight transfer"), _told_to_all(self._store):
            for rank in range(1, world):
                _await_key(
                    store=self._store,
                    key=f"here/{rank}",
                    timeout_s=self._timeout_s,
                    off=self._off,
                    what=f"rank {rank} of the weight transfer",
                )
            self._store.set("go", "1")
            place = Membership(store=self._store, rank=0, world=world, own=self.host, timeout_s=self._timeout_s)
            return BroadcastGroup(place, self._backend, self._device, self._off)

    def call_off(self) -> None:
        """Cancel the group: no member keeps waiting. Members that join later also get TransferError, as long as this
        object exists."""
        self._off.set()
        self._store.set("off", "1")


def join_group(
    address: dict[str, object],
    rank: int,
    world: int,
    backend: str,
    timeout_s: float,
    off: threading.Event,
    device: torch.device = HOST,
) -> BroadcastGroup:
    """Join the group that a `Rendezvous` gathers. `device`: device of this process's model.

    Raises BadInput if the backend can't receive there, TransferError if the sender or `off` cancels the group,
    DeadlineError.
    """
    device = group_device(backend, device)
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
        with _told_to_all(store):
            _await_key(
                store=store,
                key="go",
                timeout_s=timeout_s,
                off=off,
                what=f"the sender of the weights at {host}:{port} and the other members",
            )
            place = Membership(store=store, rank=rank, world=world, own=address_towards(host), timeout_s=timeout_s)
            return BroadcastGroup(place, backend, device, off)


@contextlib.contextmanager
def _told_to_all(store: dist.Store) -> Iterator[None]:
    """Call the group off when one of its members fails, because the others would wait for it."""
    try:
        yield
    except (BadInput, DeadlineError, TransferError, RuntimeError):
        with contextlib.suppress(RuntimeError):  # the sender may be gone, and its store with it
            store.set("off", "1")
        raise


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
        _check_off(store, off, what)
        if time.monotonic() > deadline:
            raise DeadlineError(f"{what} did not arrive within {timeout_s:g} s")
        time.sleep(LOOK_S)


def _check_off(store: dist.Store, off: threading.Event, what: str) -> None:
    if off.is_set() or store.check(["off"]):
        raise TransferError(f"the weight transfer was cancelled while it waited for {what}")


def _await_port(host: str, port: int, timeout_s: float, off: threading.Event) -> None:
    """Wait until a process listens there. (torch's own wait can't be cancelled.)"""
    deadline = time.monotonic() + min(timeout_s, REACH_S)
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError as error:
            reason = error
        if off.is_set():
            raise TransferError(f"the weight transfer was cancelled while it looked for its sender at {host}:{port}")
        if time.monotonic() > deadline:
            raise TransferError(f"the sender of the weights at {host}:{port} can't be reached: {reason}")
        time.sleep(0.02)


def own_address(loopback: bool, interface: str = "", towards: str = "") -> str:
    """Return an address of this machine that the instances can reach; 127.0.0.1 if all of them are on this machine
    (`loopback`).

    With an `interface`, this is its address. Otherwise it is that of the host's name, or, if that is a loopback, the
    one from which this machine reaches the host `towards`. Raises BadInput if there is no such interface, or only a
    loopback.
    """
    if loopback:
        return "127.0.0.1"
    if interface:
        return _interface_address(interface)
    name = socket.gethostname()
    means = socket.gethostbyname(name)
    found = means
    if towards and ipaddress.ip_address(means).is_loopback:
        with contextlib.suppress(OSError):
            found = address_towards(reachable_host(towards))
    if ipaddress.ip_address(found).is_loopback:
        raise BadInput(
            f"the name of this machine, {name}, resolves to {means}: instances on other machines can't reach that; "
            "set weights.interface to the network's, or the machine's own address in /etc/hosts"
        )
    return found


def _interface_address(name: str) -> str:
    import psutil  # imported here, because instances load this module in their own environment

    known = psutil.net_if_addrs()
    found = [one.address for one in known.get(name, []) if one.family == socket.AF_INET]
    if not found:
        raise BadInput(
            f"weights.interface = {name!r}: this machine, {socket.gethostname()}, has no such interface with an IPv4 "
            f"address; it has {', '.join(sorted(known))}"
        )
    if ipaddress.ip_address(found[0]).is_loopback:
        raise BadInput(f"weights.interface = {name!r}: instances on other machines can't reach {found[0]}, its address")
    return found[0]


class BroadcastGroup:
    """A stage's sender (rank 0) and receivers, connected. A broadcast returns before the other members call theirs."""

    def __init__(self, place: Membership, backend: str, device: torch.device, off: threading.Event) -> None:
        """Create the group and connect it. All members call this at the same time.

        `place`: with the sender's store; `device`: device of the buffers that are sent and received; `off`: cancels the
        wait, as the store's key "off" does. Raises BadInput, TransferError, DeadlineError, RuntimeError.
        """
        self.device = device
        self._backend = BACKENDS[backend]
        self._timeout_s = place.timeout_s
        self._store = place.store  # keeps the sender's store alive as long as the group
        self._made: Any = None
        self._last: list[dist.Work] = []
        self._closed = threading.Event()
        # a clone, because a wait in a store blocks other threads that use it
        own = replace(place, store=dist.PrefixStore("group", _clone(place.store, place.timeout_s)))
        connected = in_thread("connect-weights", lambda: self._connect(own))
        self._await_connection(connected, f"the {place.world} members to connect over {backend}", off)

    def _connect(self, place: Membership) -> None:
        use_device(self.device)
        self._made = self._backend.make(place)
        if self._closed.is_set():
            raise TransferError("the weight transfer was closed while it connected")
        self._backend.connect(self._made, self.device)

    def _await_connection(self, connected: Future[None], what: str, off: threading.Event) -> None:
        deadline = time.monotonic() + self._timeout_s
        try:
            while not wait([connected], LOOK_S).done:
                _check_off(self._store, off, what)
                if time.monotonic() > deadline:
                    raise DeadlineError(f"the weight transfer waited {self._timeout_s:g} s for {what}")
            connected.result()
        except BaseException:
            self.close()
            connected.add_done_callback(lambda _: self.close())  # what could not be cancelled is closed when it ends
            raise

    def broadcast(self, *pieces: Tensor) -> Transfer:
        """Start to send (rank 0) or receive pieces of memory. The pieces are contiguous and have the same sizes on all
        members."""
        made = self._made
        if made is None:
            raise TransferError("the weight transfer was closed")
        self._last = [made.broadcast(piece, 0) for piece in pieces]
        return Transfer(self._last, self._backend, self._closed, self._timeout_s)

    def close(self) -> None:
        """Leave the group. Waits of this process in the group raise TransferError at once; other members notice
        later."""
        self._closed.set()
        made = self._made
        self._made = None
        if made is None:
            return
        held = [*self._last, made]
        threading.Thread(target=_let_go, args=(held, self._backend), name="leave-group", daemon=True).start()
        self._last = []


def _clone(store: dist.Store, timeout_s: float) -> dist.Store:
    cloned: dist.Store = store.clone()  # type: ignore[attr-defined]  # the stubs lack it
    cloned.set_timeout(timedelta(seconds=timeout_s))
    return cloned


def _let_go(held: list[Any], backend: GroupBackend) -> None:
    """Abort and delete [running transfers …, group] once the transfers have ended, at the latest by their timeout.
    (gloo would wait for them while holding the interpreter lock.)"""
    with contextlib.suppress(RuntimeError):  # errors of an abandoned group do not matter
        backend.abort(held[-1])
    while not all(work.is_completed() for work in held[:-1]):
        time.sleep(0.05)
    held.clear()


class Transfer:
    """Running broadcasts."""

    def __init__(
        self, works: list[dist.Work], backend: GroupBackend, closed: threading.Event, timeout_s: float
    ) -> None:
        self._works = works
        self._backend = backend
        self._closed = closed
        self._timeout_s = timeout_s

    def wait(self) -> None:
        """Wait until the bytes have arrived. Raises TransferError if a member died or the group was closed, and
        DeadlineError."""
        deadline = time.monotonic() + self._timeout_s
        left = deque(
            self._works
        )  # a bucket has hundreds of tensors: each is looked at until it has arrived, not longer
        while left:
            if left[0].is_completed():
                left.popleft()
                continue
            if self._closed.is_set():
                raise TransferError("the weight transfer was closed while a bucket was under way")
            if time.monotonic() > deadline:
                raise DeadlineError(f"a bucket of weights was not transferred within {self._timeout_s:g} s")
            time.sleep(POLL_S)
        try:
            for work in self._works:
                self._backend.finish(work)
        except RuntimeError as error:
            raise TransferError(f"a member of the weight transfer failed: {str(error).splitlines()[0]}") from None
