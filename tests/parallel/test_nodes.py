"""Trainer ranks on two nodes that meet by rendezvous:
two agents on this machine that share nothing but the run folder."""

import subprocess
import sys

import pytest
import zmq

from engine.errors import DeadlineError
from engine.run.files import read_lines
from engine.trainer.nodes import follow_invitations
from engine.wire.control_client import ControlClient
from engine.wire.control_keys import CONTROL_KEY, make_keys
from engine.wire.invitation import INVITATION
from engine.wire.messages import Heartbeat
from support.ports import two_neighbours
from support.runs import ROOT, config_of, launch, write_config
from tasks.cluster.services import free_port

pytestmark = pytest.mark.parallel


@pytest.mark.timeout(400)
def test_two_nodes_train_what_one_does(settings, tmp_path):
    common = settings | {
        "train.steps": 2,
        "parallel.data": 2,
        "train.consume": "prompt_order",
        "rollout.deterministic": True,
        "rollout.max_new_tokens": 8,
        "rollout.timeout_s": 150,
        "train.timeout_s": 150,
    }
    two = common | {"run.name": "two", "parallel.nodes": 2, "parallel.rendezvous": f"127.0.0.1:{two_neighbours()}"}
    command = [sys.executable, "-m", "engine.launcher.launch", "--config", str(write_config(two, tmp_path))]
    launcher = subprocess.Popen(command, cwd=ROOT)
    node = subprocess.Popen(
        [sys.executable, "-m", "engine.trainer.nodes", str(tmp_path / "two"), "--wait", "60"], cwd=ROOT
    )
    try:
        assert launcher.wait(300) == 0
        assert node.wait(30) == 0
    finally:
        for process in (launcher, node):
            process.kill()
            process.wait()
    assert not (tmp_path / "two" / INVITATION).exists()
    code, said = launch(common | {"run.name": "one"}, tmp_path)
    assert code == 0, said
    keys = ("step", "reward_mean", "loss", "grad_norm")
    lines = [
        [[row[key] for key in keys] for row in read_lines(tmp_path / name / "steps.jsonl")] for name in ("one", "two")
    ]
    assert len(lines[0]) == 2
    assert lines[0] == lines[1]
    first, second = ((tmp_path / name / "policy/model.safetensors").read_bytes() for name in ("one", "two"))
    assert first == second


def test_a_node_that_is_not_asked_for_gives_up(tmp_path):
    with pytest.raises(DeadlineError, match="did not ask for other nodes within 1 s"):
        follow_invitations(tmp_path, 1.0)


def test_the_control_channel_hears_nobody_without_its_key(monkeypatch):
    from engine.wire.control_keys import guard_server

    port = free_port()
    keys = make_keys()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        guard_server(server, keys)
        server.bind(address := f"tcp://127.0.0.1:{port}")
        server.setsockopt(zmq.LINGER, 0)
        for key, heard in ((None, 0), (make_keys().public, 0), (keys.public, zmq.POLLIN)):
            monkeypatch.delenv(CONTROL_KEY, raising=False)
            if key:
                monkeypatch.setenv(CONTROL_KEY, key)
            client = ControlClient(address, "somebody", 0.2)
            with pytest.raises(DeadlineError):
                client.ask(Heartbeat(unit=0))
            assert server.poll(1000 if heard else 500) == heard
            client.close()


def test_the_layout_over_nodes_is_checked(settings):
    from engine.errors import BadInput

    for keys, said in (
        ({"parallel.nodes": 2, "parallel.rendezvous": "h:1"}, "must divide the number of ranks"),
        ({"parallel.data": 2, "parallel.nodes": 2}, "needs parallel.rendezvous"),
        ({"parallel.rendezvous": "h:1"}, "one node needs none"),
    ):
        with pytest.raises(BadInput, match=said):
            config_of(settings | keys)
    config = config_of(settings | {"parallel.data": 2, "parallel.nodes": 2, "parallel.rendezvous": "h:1"})
    assert (config.parallel.ranks, config.parallel.ranks_per_node) == (2, 1)
