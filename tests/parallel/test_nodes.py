"""Trainer ranks on two nodes that meet by rendezvous:
two agents on this machine that share nothing but the run folder."""

import asyncio
import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest

from engine.client.connection import Connection
from engine.errors import BadInput, DeadlineError, MetronomeError
from engine.orchestrator.server import Server
from engine.trainer.ranks.nodes import follow_invitations
from engine.wire.certificate import Certificate, client_context
from engine.wire.invitation import INVITATION
from engine.wire.messages import Done, Heartbeat
from support.ports import two_neighbours
from support.runs import ROOT, config_of
from support.whole_runs import orchestrating, run, same, steps, weights

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
    with orchestrating(two, tmp_path) as (orchestrator, said):
        node = subprocess.Popen(
            [sys.executable, "-m", "engine.trainer.ranks.nodes", str(tmp_path / "two"), "--wait", "60"], cwd=ROOT
        )
        try:
            assert orchestrator.wait(300) == 0, said()
            assert node.wait(30) == 0
        finally:
            node.kill()
            node.wait()
    assert not (tmp_path / "two" / INVITATION).exists()
    run(common | {"run.name": "one"}, tmp_path)
    keys = ("step", "reward_mean", "loss", "grad_norm")
    lines = [[[row[key] for key in keys] for row in steps(tmp_path, name)] for name in ("one", "two")]
    assert len(lines[0]) == 2
    assert lines[0] == lines[1]
    assert same(weights(tmp_path, "one"), weights(tmp_path, "two"))


def test_a_node_that_is_not_asked_for_gives_up(tmp_path):
    with pytest.raises(DeadlineError, match="did not ask for other nodes within 1 s"):
        follow_invitations(tmp_path, 1.0)


def test_the_server_of_other_nodes_hears_nobody_without_its_invitation(settings, tmp_path):
    """The one who asks needs the run's token, and believes no server but the one with the invitation's certificate."""
    nodes = {"parallel.data": 2, "parallel.nodes": 2, "parallel.rendezvous": f"127.0.0.1:{two_neighbours()}"}
    certificate = Certificate.make()
    heard = []

    async def answer(request, ours):
        heard.append(request)
        return Done()

    def asked(url, token, trusted):
        client = Connection(url, token, "somebody", timeout_s=10.0, certificate=trusted)
        try:
            return client.ask(Heartbeat(replica_group=0))
        finally:
            client.close()

    async def ask():
        server = Server(config_of(settings | nodes))
        server.serve(SimpleNamespace(answer=answer))
        async with server.listening(tmp_path, certificate):
            assert server.url.startswith("https://")
            for token, trusted, said in (
                (
                    server.key,
                    Certificate.make().public,
                    (MetronomeError, "can't be reached.*certificate verify failed"),
                ),
                (None, certificate.public, (BadInput, "the access token is missing or wrong")),
                ("x" * 64, certificate.public, (BadInput, "the access token is missing or wrong")),
            ):
                with pytest.raises(said[0], match=said[1]):
                    await asyncio.to_thread(asked, server.url, token, trusted)
            plain = server.url.replace("https", "http")
            with pytest.raises(MetronomeError, match="can't be reached"):
                await asyncio.to_thread(asked, plain, server.key, None)
            assert heard == []
            async with httpx.AsyncClient(verify=client_context(certificate.public)) as http:
                for route in ("status", "metrics"):
                    assert (await http.get(f"{server.url}/{route}")).status_code == 401
                assert (await http.post(f"{server.url}/join", json={})).status_code == 401
            await asyncio.to_thread(asked, server.url, server.key, certificate.public)
        assert heard == [Heartbeat(replica_group=0)]

    asyncio.run(ask())


def test_the_layout_over_nodes_is_checked(settings):
    for keys, said in (
        ({"parallel.nodes": 2, "parallel.rendezvous": "h:1"}, "must divide the number of ranks"),
        ({"parallel.data": 2, "parallel.nodes": 2}, "needs parallel.rendezvous"),
        ({"parallel.rendezvous": "h:1"}, "one node needs none"),
    ):
        with pytest.raises(BadInput, match=said):
            config_of(settings | keys)
    config = config_of(settings | {"parallel.data": 2, "parallel.nodes": 2, "parallel.rendezvous": "h:1"})
    assert (config.parallel.ranks, config.parallel.ranks_per_node) == (2, 1)
