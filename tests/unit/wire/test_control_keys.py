"""Who reaches the control channel between nodes: only a peer with the key, which only the file's owner can read."""

import asyncio
import contextlib
import socket
import stat
import threading

import pytest

from engine.config import Config
from engine.errors import DeadlineError
from engine.wire.control_client import ControlClient
from engine.wire.control_keys import CONTROL_KEY, make_keys
from engine.wire.control_server import ControlServer
from engine.wire.invitation import INVITATION, invite, wait_for_invitation
from engine.wire.messages import Done, Heartbeat


async def agree(request):
    return Done()


@pytest.fixture
def keyed():
    """A server with keys on a free port of loopback; gives its address and its keys."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    keys = make_keys()
    loop = asyncio.new_event_loop()
    server = loop.create_task(ControlServer(address, agree, keys).serve())

    def serve():
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(server)
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield address, keys
    loop.call_soon_threadsafe(server.cancel)
    thread.join(10)


def ask(address, timeout_s):
    client = ControlClient(address, "trainer-1", timeout_s)
    try:
        return client.ask(Heartbeat(unit=0))
    finally:
        client.close()


def test_only_a_peer_with_the_servers_key_is_answered(keyed, monkeypatch):
    address, keys = keyed
    for key in (None, make_keys().public):
        monkeypatch.delenv(CONTROL_KEY, raising=False)
        if key is not None:
            monkeypatch.setenv(CONTROL_KEY, key)
        with pytest.raises(DeadlineError):
            ask(address, 0.5)
    monkeypatch.setenv(CONTROL_KEY, keys.public)
    assert ask(address, 20.0) == Done()


def test_an_invitation_can_be_read_by_its_owner_alone(tmp_path):
    config = Config()
    config = config.model_copy(
        update={"parallel": config.parallel.model_copy(update={"rendezvous": "10.0.0.1:29500", "nodes": 2})}
    )
    invite(config=config, folder=tmp_path, run_id="a", arguments=["--rank"], key="secret")
    assert stat.S_IMODE((tmp_path / INVITATION).stat().st_mode) == 0o600
    found = wait_for_invitation(tmp_path, "", 1.0)
    assert (found.key, found.rendezvous, found.arguments) == ("secret", "10.0.0.1:29500", ["--rank"])
