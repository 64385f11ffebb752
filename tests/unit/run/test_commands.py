"""What the environment of the trainer's ranks adds: on one node their collectives stay on loopback."""

import socket
from pathlib import Path

import pytest

from engine.config.recipe import load_config
from engine.run.commands import scorer_environment, store_command, trainer_environment

NAMES = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
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
    config = load_config(None, overrides)
    found = trainer_environment(config, elsewhere)
    assert NAMES & found.keys() == bound
    assert {found[name] for name in bound} <= {name for _, name in socket.if_nameindex()}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")  # what the user has set stays
    assert NAMES & trainer_environment(config, elsewhere).keys() == bound - {"NCCL_SOCKET_IFNAME"}


EXPANDABLE = {"PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"}
QUEUE = "TASK_QUEUE_ENABLE"
ALWAYS = EXPANDABLE | {QUEUE}
OLDER = "PYTORCH_CUDA_ALLOC_CONF"  # for CUDA torch reads it before PYTORCH_ALLOC_CONF
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(
    ("tensor", "own", "added"),
    [
        (1, {}, ALWAYS),
        (2, {}, ALWAYS | {CONNECTIONS}),
        (2, {CONNECTIONS: "8"}, ALWAYS),
        (1, {"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF", QUEUE}),
        (1, {QUEUE: "0"}, EXPANDABLE),
        (1, {"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_NPU_ALLOC_CONF", QUEUE}),
        (1, {OLDER: "max_split_size_mb:64"}, {"PYTORCH_NPU_ALLOC_CONF", QUEUE}),
    ],
)
def test_what_ranks_get_where_the_user_has_set_nothing(monkeypatch, tensor, own, added):
    names = ALWAYS | {OLDER, CONNECTIONS}
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    layout = [f"parallel.tensor={tensor}"]
    scorer = [f"stages.reference.tensor={tensor}", "algorithm.kl_coef=0.1"]
    values = dict.fromkeys(EXPANDABLE, "expandable_segments:True") | {CONNECTIONS: "1", QUEUE: "2"}
    for found in (
        trainer_environment(load_config(None, layout), False),
        trainer_environment(load_config(None, [*layout, "parallel.data=2", *SEVERAL[1:]]), True),
        scorer_environment(load_config(None, scorer), "reference"),
    ):
        assert {name: found[name] for name in names & found.keys()} == {name: values[name] for name in added}


STORED = ["queue.store=transferqueue", "queue.unauthenticated=true"]
CLUSTER = [*STORED, "queue.address=head:6379"]


def test_transferqueue_joins_a_cluster_where_an_address_is_given():
    command = store_command(load_config(None, CLUSTER).queue, "metronome-run", Path("/place"))
    assert command[3:] == [*("--name", "metronome-run", "--addresses", "/place/addresses", "--address", "head:6379")]
    command = store_command(load_config(None, STORED).queue, "metronome-run", Path("/place"))
    assert command[-2:] == ["--folder", "/place/ray"]
