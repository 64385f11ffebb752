"""Addresses as a recipe writes them."""

import pytest

from engine.config import Config
from engine.errors import BadInput
from engine.wire import address
from engine.wire.invitation import wait_for_invitation, write_invitation


def test_auto_is_this_machines_address_and_others_are_told_which(monkeypatch, tmp_path):
    """Another node has another address on its default route."""
    monkeypatch.setattr(address, "address_towards", lambda peer: "10.0.0.7")
    assert address.split_address("auto:7000", "rollout.listen") == ("10.0.0.7", 7000)
    config = Config(parallel={"nodes": 2, "data": 2, "rendezvous": "auto:29500"})
    write_invitation(config, tmp_path, "id", [], "token", "certificate")
    monkeypatch.setattr(address, "address_towards", lambda peer: "10.0.0.8")
    assert wait_for_invitation(tmp_path, "", 1.0).rendezvous == "10.0.0.7:29500"


def test_a_machine_without_a_network_has_none(monkeypatch):
    def no_route(peer):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(address, "address_towards", no_route)
    with pytest.raises(BadInput, match="parallel.rendezvous = 'auto:1': this machine has no default route; give its"):
        address.split_address("auto:1", "parallel.rendezvous")
