"""What the environment of the trainer's ranks adds: on one node their collectives stay on loopback."""

import socket

import pytest

from engine.config.recipe import load
from engine.run.commands import STORE_IS_HERE, trainer_environment

NAMES = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"}
VLLM = ["rollout.engine=vllm"]
SEVERAL = ["parallel.data=2", "parallel.nodes=2", "parallel.rendezvous=h:1"]


@pytest.mark.parametrize(
    ("overrides", "elsewhere", "bound"),
    [
        ([], False, NAMES),
        ([], True, {"GLOO_SOCKET_IFNAME"}),
        ([*VLLM, "weights.transport=nccl"], False, {"GLOO_SOCKET_IFNAME"}),
        (["weights.transport=gloo"], False, NAMES),
        (SEVERAL, False, set()),
    ],
)
def test_what_listens_on_loopback(monkeypatch, overrides, elsewhere, bound):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    found = trainer_environment(load(None, overrides), elsewhere)
    assert NAMES & found.keys() == bound
    assert {found[name] for name in bound} <= {name for _, name in socket.if_nameindex()}


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    assert "NCCL_SOCKET_IFNAME" not in trainer_environment(load(None), False)


def test_the_ranks_beside_transferqueue_know_of_it():
    elsewhere = ["queue.store=transferqueue", "queue.unauthenticated=true"]
    assert STORE_IS_HERE in trainer_environment(load(None, elsewhere), False)
    assert STORE_IS_HERE in trainer_environment(load(None, [*elsewhere, *SEVERAL]), False)
    assert STORE_IS_HERE not in trainer_environment(load(None), False)
