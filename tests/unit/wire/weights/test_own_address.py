import socket
from types import SimpleNamespace

import psutil
import pytest

from engine.errors import BadInput
from engine.wire.weights.groups import own_address


def test_a_host_name_that_means_loopback_is_refused_where_instances_are_elsewhere(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert own_address(loopback=True) == "127.0.0.1"
    with pytest.raises(
        BadInput,
        match=r"the name of this machine, node7, resolves to 127\.0\.1\.1: "
        "instances on other machines can't reach that",
    ):
        own_address(loopback=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.1.2.3")
    assert own_address(loopback=False) == "10.1.2.3"


def test_where_the_name_means_loopback_the_address_on_the_network_of_the_run_is_taken(monkeypatch):
    """The name of a Debian host is 127.0.1.1."""
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr("engine.wire.weights.groups.address_towards", lambda peer: {"10.0.0.1": "10.0.0.7"}[peer])
    assert own_address(loopback=False, towards="10.0.0.1") == "10.0.0.7"
    monkeypatch.setattr("engine.wire.weights.groups.address_towards", lambda peer: peer)
    with pytest.raises(BadInput, match=r"can't reach that; set weights\.interface to the network's, or"):
        own_address(loopback=False, towards="127.0.0.1")


def test_an_interface_may_be_named(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.1.2.3")
    addresses = {"lo": "127.0.0.1", "ib0": "10.7.0.3"}
    known = {name: [SimpleNamespace(family=socket.AF_INET, address=one)] for name, one in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    assert own_address(loopback=False, interface="ib0") == "10.7.0.3"
    with pytest.raises(BadInput, match=r"weights\.interface = 'ib7': .* no such interface .* it has ib0, lo"):
        own_address(loopback=False, interface="ib7")
    with pytest.raises(BadInput, match=r"weights\.interface = 'lo': .* can't reach 127\.0\.0\.1"):
        own_address(loopback=False, interface="lo")
    assert own_address(loopback=True, interface="ib7") == "127.0.0.1"
