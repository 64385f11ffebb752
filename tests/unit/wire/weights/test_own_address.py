import socket

import pytest

from engine.errors import BadInput
from engine.wire.weights.groups import own_address


def test_a_host_name_that_means_loopback_is_refused_where_instances_are_elsewhere(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert own_address(loopback=True) == "127.0.0.1"
    with pytest.raises(
        BadInput,
        match=r"the name of this machine, node7, means 127\.0\.1\.1: instances on other machines can't reach that",
    ):
        own_address(loopback=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.1.2.3")
    assert own_address(loopback=False) == "10.1.2.3"
