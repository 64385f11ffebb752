"""How the elastic agents of a run's nodes find each other: at a store on the launcher's node.

torch's own rendezvous listens on all addresses and unpickles what it finds in its store. Here the nodes are known in
advance, the store listens on one address, and nothing that is read from it is more than text.
"""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta

import psutil
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from engine.wire.address import split_address
from engine.wire.store import serve_store

BACKEND = "metronome"
"""Name of this rendezvous in torch's registry."""
JOIN_S = 600.0
"""Seconds that all nodes have to come."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the interface on which a rank's gloo listens."""


class FixedNodes(RendezvousHandler):
    """The rendezvous of a fixed number of nodes. The ranks use its store, too (MASTER_ADDR, MASTER_PORT)."""

    use_agent_store = True

    def __init__(self, endpoint: str, run_id: str, nodes: int, serves: bool, wait_s: float = JOIN_S) -> None:
        """`endpoint`: host:port of the store; `run_id`: keeps the attempts at a run apart; `serves`: whether the store
        is this node's."""
        self._host, self._port = split_address(endpoint, "parallel.rendezvous")
        self._run_id = run_id
        self._nodes = nodes
        self._serves = serves
        self._wait_s = wait_s

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all nodes are here. The node that serves the store is the first; the others are numbered as they
        come. With several nodes, this one's ranks use gloo on its interface to the store's host, unless the user has
        chosen one.

        Raises RendezvousConnectionError if the store can't be served or reached, or this node is one too many,
        RendezvousTimeoutError naming the nodes that did not come.
        """
        served = self._open_store()
        if self._nodes > 1:  # gloo alone would take the address of the host's name, which is often a loopback
            os.environ.setdefault(GLOO_INTERFACE, interface_to(self._host))
        store = dist.PrefixStore(self._run_id, served)
        node = 0 if self._serves else store.add("others", 1)
        if node >= self._nodes:
            raise RendezvousConnectionError(f"the run has {self._nodes} nodes, and all of them are there")
        store.set(f"here/{node}", "")
        self._await_all(store)
        return RendezvousInfo(store, node, self._nodes, RendezvousStoreInfo(self._host, served.port))

    def _open_store(self) -> dist.TCPStore:
        try:
            if self._serves:
                return serve_store(self._host, self._wait_s, self._port)
            wait = timedelta(seconds=self._wait_s)
            return dist.TCPStore(self._host, self._port, is_master=False, timeout=wait, wait_for_workers=False)
        except (OSError, RuntimeError) as error:
            raise RendezvousConnectionError(str(error).splitlines()[0]) from None

    def _await_all(self, store: dist.Store) -> None:
        keys = [f"here/{node}" for node in range(self._nodes)]
        try:
            store.wait(keys, timedelta(seconds=self._wait_s))
        except RuntimeError:
            missing = sum(not store.check([key]) for key in keys)
            raise RendezvousTimeoutError(
                f"{missing} of {self._nodes} nodes did not come within {self._wait_s:g} s"
            ) from None

    def get_backend(self) -> str:
        """Name of this rendezvous in torch's registry."""
        return BACKEND

    def is_closed(self) -> bool:
        """Whether nobody may come any more: never, since the number of nodes is fixed."""
        return False

    def set_closed(self) -> None:
        """Nothing is kept that could be closed."""

    def num_nodes_waiting(self) -> int:
        """Nodes that wait to be taken in: none ever is."""
        return 0

    def get_run_id(self) -> str:
        """What the nodes of this attempt have in common."""
        return self._run_id

    def shutdown(self) -> bool:
        """The store ends with this process, so there is nothing to do."""
        return True


def interface_to(host: str) -> str:
    """Return the name of the interface through which this machine reaches a host. Nothing is sent to it.

    Raises RendezvousConnectionError if there is none.
    """
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            own = probe.getsockname()[0]
            for name, addresses in psutil.net_if_addrs().items():
                if own in [one.address for one in addresses]:
                    return name
    raise RendezvousConnectionError(
        f"no interface of this machine leads to {host} (parallel.rendezvous): set {GLOO_INTERFACE} to the training "
        "network's"
    )


def _handler(parameters: RendezvousParameters) -> FixedNodes:
    return FixedNodes(
        endpoint=parameters.endpoint,
        run_id=parameters.run_id,
        nodes=parameters.max_nodes,
        serves=bool(parameters.get_as_bool("serves")),
    )


def register() -> None:
    """Make torch's elastic agent know this rendezvous as BACKEND."""
    rendezvous_handler_registry.register(BACKEND, _handler)
