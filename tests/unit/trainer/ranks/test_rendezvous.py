"""How nodes meet: on one address, and no byte that a stranger leaves there is run."""

import base64
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from engine.config.recipe import load_config
from engine.platform.parallel import STORE
from engine.trainer.ranks import agent
from engine.trainer.ranks.agent import GLOO_INTERFACE, FixedNodes, interface_to
from engine.trainer.ranks.nodes import follow_invitations
from engine.wire.invitation import write_invitation
from engine.wire.weights.groups import serve_store
from support.ports import free_port
from support.runs import ROOT, wait_for


def nodes(port, count, wait_s=10.0):
    """The first node and as many others as said."""
    endpoint = f"127.0.0.1:{port}"
    return [FixedNodes(endpoint, "attempt", count, serves=number == 0, wait_s=wait_s) for number in range(count)]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """The rendezvous sets a variable for the ranks."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ.pop(GLOO_INTERFACE, None)


def own_addresses():
    """This machine's addresses, each with its interface."""
    return [
        (name, one.address)
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family == socket.AF_INET
    ]


def test_gloo_listens_where_the_orchestrators_host_is_reached():
    (loopback,) = [name for name, address in own_addresses() if address == "127.0.0.1"]
    for name, address in own_addresses():
        assert interface_to(address) == name
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(FixedNodes.next_rendezvous, nodes(free_port(), 2)))
    assert os.environ[GLOO_INTERFACE] == loopback


def test_the_way_to_a_host_that_no_interface_leads_to_is_asked_for(monkeypatch):
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    with pytest.raises(RendezvousConnectionError, match="no interface .* leads to 127.0.0.1 .*set GLOO_SOCKET_IFNAME"):
        interface_to("127.0.0.1")


def test_each_node_gets_a_number_and_the_ranks_store():
    port = free_port()
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(FixedNodes.next_rendezvous, nodes(port, 3)))
    assert sorted(one.rank for one in found) == [0, 1, 2]
    assert found[0].rank == 0
    assert {one.world_size for one in found} == {3}
    for one in found:
        info = one.bootstrap_store_info
        assert (info.master_addr, info.master_port) == ("127.0.0.1", port)


def test_the_node_of_the_store_is_the_first_whoever_comes_first():
    port = free_port()
    first, other = nodes(port, 2)
    store = serve_store("127.0.0.1", 10.0, port)
    first._open_store = lambda: store
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(other.next_rendezvous)
        wait_for(lambda: any(key.endswith("others") for key in store.list_keys()), "the other node", 10)
        assert first.next_rendezvous().rank == 0
        assert early.result(10).rank == 1


def test_one_node_listens_on_no_port_and_its_ranks_meet_in_a_file_of_their_user(monkeypatch):
    """Any process of the machine could delete the keys of a store behind a port."""
    monkeypatch.setenv(STORE, "")
    before = psutil.Process().net_connections("inet")
    [node] = nodes(0, 1)
    met = node.next_rendezvous()
    met.store.set("key", "value")
    assert met.store.get("key") == b"value"
    assert psutil.Process().net_connections("inet") == before
    assert Path(os.environ[STORE]).parent.stat().st_mode & 0o777 == 0o700


def test_one_node_too_many_is_refused():
    port = free_port()
    first, other = nodes(port, 2)
    late = FixedNodes(f"127.0.0.1:{port}", "attempt", 2, serves=False, wait_s=10)
    with ThreadPoolExecutor(2) as threads:
        kept = list(threads.map(FixedNodes.next_rendezvous, [first, other]))
    with pytest.raises(RendezvousConnectionError, match="the run has 2 nodes, and all of them have joined"):
        late.next_rendezvous()
    assert len(kept) == 2


def test_a_node_of_an_earlier_attempt_is_not_counted():
    port = free_port()
    first, _ = nodes(port, 2, wait_s=1.0)
    stale = FixedNodes(f"127.0.0.1:{port}", "earlier", 2, serves=False, wait_s=0.5)
    errors = []

    def meet(node):
        try:
            node.next_rendezvous()
        except RendezvousTimeoutError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=meet, args=(node,)) for node in (first, stale)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(errors) == ["1 of 2 nodes did not join within 0.5 s", "1 of 2 nodes did not join within 1 s"]


class Harmful:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_what_a_stranger_writes_into_the_store_is_not_run(tmp_path):
    """The agent waits for the second node; a stranger who knows only the port overwrites every key meanwhile."""
    port = free_port()
    command = [sys.executable, "-m", "engine.trainer.ranks.agent", "--ranks", "1", "--nodes", "2"]
    agent = subprocess.Popen(
        [*command, "--rendezvous", f"127.0.0.1:{port}", "--run-id", "run", "--", "--none"],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    harmful = base64.b64encode(pickle.dumps(Harmful(tmp_path / "ran")))
    try:
        wait_for(lambda: listens(agent.pid, port), "the agent's store", 60)
        stranger = TCPStore("127.0.0.1", port, is_master=False)
        wait_for(stranger.list_keys, "the first key of the store", 30)
        until = time.monotonic() + 8
        while time.monotonic() < until and not (tmp_path / "ran").exists():
            for key in stranger.list_keys():
                stranger.set(key.removeprefix("/"), harmful)
            time.sleep(0.02)
        assert agent.poll() is None
    finally:
        agent.kill()
        agent.wait()
    assert not (tmp_path / "ran").exists()


def listens(pid, port):
    return any(
        one.status == psutil.CONN_LISTEN and one.laddr.port == port
        for one in psutil.Process(pid).net_connections("inet")
    )


def test_ranks_of_other_nodes_have_the_same_defaults_and_the_users_values(tmp_path, monkeypatch):
    config = load_config(None, ["parallel.tensor=2", "parallel.nodes=2", "parallel.rendezvous=127.0.0.1:29500"])
    write_invitation(config=config, folder=tmp_path, run_id="a", arguments=[], token="secret", certificate="public")
    own = {"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64"}
    seen = {}
    with (
        patch.dict(os.environ, own, clear=True),
        patch.object(agent, "run_ranks", lambda **_: seen.update(os.environ) or 0),
    ):
        follow_invitations(tmp_path, 1.0)
    expected = own | {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert seen.items() >= expected.items()
