"""Starts a node's ranks, of the trainer or of a scorer, under torch's elastic agent.

`python -m engine.trainer.ranks.agent --ranks N [--module MODULE] -- <rank arguments>`

The agent is a separate process. It ends with the orchestrator, and the ranks end with it (engine.run.process). With
several nodes, each node has one agent; the agents meet at a store on the orchestrator's node (trainer/ranks/nodes.py).

torch's built-in rendezvous listens on all addresses and unpickles what it finds in its store. Here the nodes are known
in advance, the store is a file of this user on one node and listens on one address with several, and everything read
from it is treated as plain text.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import psutil
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from engine.platform.parallel import STORE
from engine.run.commands import SCORER_RANK, TRAINER_RANK
from engine.run.logs import log_error
from engine.run.process import LIFELINE, hold_lifeline, watch_lifeline
from engine.wire.address import split_address
from engine.wire.weights.groups import serve_store

BACKEND = "metronome"
"""Name of this rendezvous in torch's registry."""
JOIN_S = 600.0
"""Seconds within which all nodes must join."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable that names the network interface on which a rank's gloo listens."""


class FixedNodes(RendezvousHandler):
    """A rendezvous with a fixed number of nodes. With several, the ranks also use its store (MASTER_ADDR, MASTER_PORT);
    on one node, a file of their own (engine.platform.parallel.STORE)."""

    use_agent_store = True

    def __init__(self, endpoint: str, run_id: str, nodes: int, serves: bool, wait_s: float = JOIN_S) -> None:
        """`endpoint`: host:port of the store; `run_id`: separates the attempts at a run; `serves`: whether this node
        serves the store."""
        self._host, self._port = split_address(endpoint, "parallel.rendezvous")
        self._run_id = run_id
        self._nodes = nodes
        self._serves = serves
        self._wait_s = wait_s

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all nodes have joined. The node that serves the store is node 0; the others are numbered in order
        of arrival. With several nodes, this node's ranks use gloo on the interface that leads to the store's host,
        unless the user has chosen one.

        Raises RendezvousConnectionError if the store can't be served or reached or all nodes have joined already,
        RendezvousTimeoutError if nodes are missing.
        """
        if self._nodes == 1:
            return self._meet_alone()
        served = self._open_store()
        # gloo's default is the address of the host's name, which is often a loopback
        os.environ.setdefault(GLOO_INTERFACE, interface_to(self._host))
        store = dist.PrefixStore(self._run_id, served)
        node = 0 if self._serves else store.add("others", 1)
        if node >= self._nodes:
            raise RendezvousConnectionError(f"the run has {self._nodes} nodes, and all of them have joined")
        store.set(f"here/{node}", "")
        self._await_all(store)
        return RendezvousInfo(store, node, self._nodes, RendezvousStoreInfo(self._host, served.port))

    def _meet_alone(self) -> RendezvousInfo:
        folder = Path(hold_lifeline()).parent
        os.environ[STORE] = str(folder / "ranks")
        return RendezvousInfo(dist.FileStore(str(folder / "agent")), 0, 1, RendezvousStoreInfo(self._host, 0))

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
                f"{missing} of {self._nodes} nodes did not join within {self._wait_s:g} s"
            ) from None

    def get_backend(self) -> str:
        """Return this rendezvous's name in torch's registry."""
        return BACKEND

    def is_closed(self) -> bool:
        """Whether no more nodes may join. Always False, since the number of nodes is fixed."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is no state to close."""

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes waiting to join: always 0."""
        return 0

    def get_run_id(self) -> str:
        """Return the id shared by the nodes of this attempt."""
        return self._run_id

    def shutdown(self) -> bool:
        """Do nothing: the store ends with this process."""
        return True


def interface_to(host: str) -> str:
    """Return the name of the interface through which this machine reaches a host. Sends nothing.

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


def register_rendezvous() -> None:
    """Register this rendezvous with torch's elastic agent as BACKEND."""
    rendezvous_handler_registry.register(BACKEND, _handler)


KILL_S = 2
"""Seconds a rank has to end before it is killed. A rank that hangs may not notice its lifeline either."""


def main() -> int:
    """Run the ranks until they end. Return 0 if all succeeded, else 1."""
    watch_lifeline()
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, required=True, help="on this node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--rendezvous", default="127.0.0.1:0", help="host:port on the orchestrator's node")
    parser.add_argument("--run-id", default=uuid.uuid4().hex, help="the same for all nodes of a run")
    parser.add_argument("--module", default=TRAINER_RANK, help="what each rank runs")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    rest = arguments.rest[1:] if arguments.rest[:1] == ["--"] else arguments.rest
    return run_ranks(
        ranks=arguments.ranks,
        arguments=rest,
        nodes=arguments.nodes,
        rendezvous=arguments.rendezvous,
        run_id=arguments.run_id,
        serves=True,
        module=arguments.module,
    )


def run_ranks(
    ranks: int,
    arguments: Sequence[str],
    nodes: int,
    rendezvous: str,
    run_id: str,
    serves: bool,
    module: str = TRAINER_RANK,
) -> int:
    """Run this node's ranks until they end. Return 0 if all succeeded; else print the error and return 1.

    `serves`: whether this node serves the store at `rendezvous`, where the nodes and the ranks meet; `module`: the
    module that each rank runs.
    """
    name = "scorer" if module == SCORER_RANK else "trainer"
    register_rendezvous()
    _kill_soon()
    lifeline = hold_lifeline()
    os.environ[LIFELINE] = lifeline  # the ranks watch the agent, not the orchestrator
    launch = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=ranks,
        run_id=run_id,
        rdzv_backend=BACKEND,
        rdzv_endpoint=rendezvous,
        rdzv_configs={"serves": serves},
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(str(Path(lifeline).parent)),  # torch never removes the folder that it makes itself
    )
    try:
        elastic_launch(launch, sys.executable)("-u", "-m", module, *arguments)
    except ChildFailedError as error:
        rank, failure = _first_failure(error)
        log_error(f"{name} rank {rank}: {failure.message}")
        return 1
    except RendezvousError as error:
        log_error(f"the nodes did not meet at {rendezvous}: {error}")
        return 1
    except SignalException as ended:
        log_error(f"the {name} ranks are ended: {signal.Signals(ended.sigval).name}")
        return 1
    return 0


def _kill_soon() -> None:
    """Make torch wait KILL_S before it kills a rank, instead of 30 s.

    When a signal ends the agent, torch reads the environment variable. When a rank has failed, and always before torch
    2.13, torch uses the default argument of `PContext.close`, for which there is no setting.
    """
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(KILL_S)
    PContext.close.__defaults__ = (None, KILL_S)


def _first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Return the rank that failed first, and its failure.

    A rank ended by a signal counts as first, because the others exit when they lose their connection to it. SIGTERM
    does not count, because this agent sends it to the others. torch's timestamps can't tell, since they are in whole
    seconds.
    """
    others = (-signal.SIGTERM, *range(256))
    return min(error.failures.items(), key=lambda item: (item[1].exitcode in others, item[1].timestamp))


if __name__ == "__main__":
    sys.exit(main())
