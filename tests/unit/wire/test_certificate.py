"""Between nodes the server speaks TLS: a rank trusts the certificate in its invitation, and no other."""

import asyncio
import contextlib
import socket
import stat

import aiohttp
import pytest

from engine.client.connection import Connection
from engine.config import Config
from engine.errors import BadInput, MetronomeError
from engine.orchestrator.server import Server, rendezvous_neighbour
from engine.wire.certificate import CERTIFICATE, Certificate, own_certificate
from engine.wire.invitation import INVITATION, wait_for_invitation, write_invitation
from engine.wire.messages import Done, Heartbeat


class Plane:
    async def answer(self, request, ours):
        return Done()


@contextlib.asynccontextmanager
async def between_nodes(folder, certificate):
    """A server of a run of two nodes, whose second listener is the neighbour of the rendezvous."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        near = free.getsockname()[1]
    config = Config()
    parallel = config.parallel.model_copy(update={"rendezvous": f"127.0.0.1:{near - 1}", "nodes": 2})
    server = Server(config.model_copy(update={"parallel": parallel}))
    server.serve(Plane())
    async with server.listening(folder, certificate):
        assert server.url == f"https://127.0.0.1:{near}"
        yield server


async def ask(url, token, certificate):
    connection = Connection(url, token, "trainer-1", timeout_s=5.0, certificate=certificate)
    try:
        return await asyncio.to_thread(connection.ask, Heartbeat())
    finally:
        connection.close()


async def test_a_client_trusts_the_servers_certificate_alone_and_the_server_wants_the_token_too(tmp_path):
    certificate = Certificate.make()
    other = Certificate.make()
    async with between_nodes(tmp_path, certificate) as server:
        assert await ask(server.url, server.key, certificate.public) == Done()
        with pytest.raises(MetronomeError, match="can't be reached: .*CERTIFICATE_VERIFY_FAILED"):
            await ask(server.url, server.key, other.public)
        with pytest.raises(BadInput, match="the access token is missing or wrong"):
            await ask(server.url, "other", certificate.public)
        with pytest.raises(MetronomeError, match="can't be reached"):
            await ask(server.url.replace("https", "http"), server.key, None)  # plain text on the port of TLS
        near = (tmp_path / "rollout.address").read_text().strip()
        assert await ask(f"http://{near}", server.key, None) == Done()  # on loopback


async def test_a_neighbour_that_is_taken_is_named_and_nothing_listens_on(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = Config()
        parallel = config.parallel.model_copy(update={"rendezvous": f"127.0.0.1:{port - 1}", "nodes": 2})
        server = Server(config := config.model_copy(update={"parallel": parallel}))
        assert rendezvous_neighbour(config) == f"127.0.0.1:{port}"
        with pytest.raises(BadInput, match=rf"parallel.rendezvous = '127.0.0.1:{port}': Address already in use"):
            async with server.listening(tmp_path, Certificate.make()):
                pass
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(server.url)


def test_an_invitation_can_be_read_by_its_owner_alone_and_a_rank_finds_the_certificate(tmp_path, monkeypatch):
    config = Config()
    config = config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"rendezvous": "10.0.0.1:29500", "nodes": 2})}
    )
    public = Certificate.make().public
    write_invitation(
        config=config, folder=tmp_path, run_id="a", arguments=["--rank"], token="secret", certificate=public
    )
    assert stat.S_IMODE((tmp_path / INVITATION).stat().st_mode) == 0o600
    found = wait_for_invitation(tmp_path, "", 1.0)
    assert (found.token, found.certificate, found.rendezvous) == ("secret", public, "10.0.0.1:29500")
    assert found.arguments == ["--rank"]
    monkeypatch.setenv(CERTIFICATE, found.certificate)
    assert own_certificate() == public
    monkeypatch.delenv(CERTIFICATE)
    assert own_certificate() is None
