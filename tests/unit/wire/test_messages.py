"""The messages between launcher and trainer: what crosses, what is refused, and who speaks another protocol."""

import asyncio
import json
import threading
from typing import get_args

import msgspec
import pytest
import zmq

from engine import errors
from engine.errors import BadInput, DeadlineError, MetronomeError, RatioGapError
from engine.launcher.coordinator import Coordinator
from engine.launcher.pool.instance_client import InstanceGone
from engine.wire import control_client, messages
from engine.wire.control_client import ControlClient
from engine.wire.control_server import ControlServer
from engine.wire.invitation import INVITATION, wait_for_invitation
from engine.wire.messages import Done, Failure, Heartbeat, Lease, StillWaiting, pack, read_message, read_request


def test_every_request_and_every_message_is_read_as_what_it_was_sent_as():
    for union, base in ((messages.AnyRequest, messages.ControlRequest), (messages.AnyMessage, messages.Message)):
        assert set(get_args(union)) == {kind for kind in vars(messages).values() if is_leaf(kind, base)}
    lease = Lease(step=3, unit=1, budget=100, trained=(4, 5))
    assert read_request(pack(lease)) == lease
    assert read_message(pack(StillWaiting())) == StillWaiting()


def is_leaf(kind, base):
    return isinstance(kind, type) and issubclass(kind, base) and kind is not base


def test_every_error_of_ours_crosses_as_itself_and_one_of_a_single_process_as_its_base():
    ours = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MetronomeError)}
    assert set(messages.ERRORS.values()) == ours
    for kind in ours:
        there = read_message(pack(Failure.of(kind("why")))).error()
        assert (type(there), str(there)) == (kind, "why")
    assert type(Failure.of(InstanceGone("gone")).error()) is MetronomeError


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "Lease", "step": 3, "budget": 1},
        {"type": "Lease", "step": "3", "budget": 1, "trained": []},
        {"type": "Lease", "step": 3, "budget": 1, "trained": [], "more": 1},
        {"type": "Nothing"},
        {"step": 3},
        [],
    ],
)
def test_what_is_no_request_is_refused(wrong):
    with pytest.raises(msgspec.ValidationError):
        read_request(msgspec.msgpack.encode(wrong))


def test_a_replay_answers_no_request_about_instances(tmp_path):
    from engine.config import Config
    from engine.run.folder import RunFolder
    from engine.run.trace import Trace

    coordinator = Coordinator(Config(), RunFolder(tmp_path), Trace(tmp_path / "trace", "launcher"))
    with pytest.raises(MetronomeError, match="Lease: a run that replays a record has no instances"):
        asyncio.run(coordinator.answer(Lease(step=0, unit=0, budget=1, trained=())))


@pytest.fixture
def served(tmp_path):
    """A server whose answers are those of the given function; gives its address."""
    address = f"ipc://{tmp_path}/control"
    stop = threading.Event()
    threads = []

    async def serve(answer):
        server = asyncio.create_task(ControlServer(address, answer).serve())
        while not stop.is_set() and not server.done():
            await asyncio.sleep(0.01)
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)

    def start(answer):
        threads.append(thread := threading.Thread(target=lambda: asyncio.run(serve(answer))))
        thread.start()
        return address

    yield start
    stop.set()
    for thread in threads:
        thread.join(10)


async def refuse(request):
    raise RatioGapError(f"{type(request).__name__} of unit {request.unit} is refused")


async def agree(request):
    return Done()


def test_a_launcher_that_does_not_answer_is_named_with_the_request(tmp_path):
    client = ControlClient(f"ipc://{tmp_path}/nobody", "trainer-0", 0.1)
    with pytest.raises(DeadlineError, match="trainer-0: no answer from the launcher to Heartbeat in 0 s"):
        client.ask(Heartbeat(unit=0))
    client.close()


def test_an_answer_crosses_and_so_does_an_error(served):
    client = ControlClient(served(refuse), "trainer-0", 10)
    with pytest.raises(RatioGapError, match="Heartbeat of unit 3 is refused"):
        client.ask(Heartbeat(unit=3))
    client.close()


def test_a_client_of_another_protocol_is_refused_by_name_and_the_server_lives_on(served, monkeypatch):
    address = served(agree)
    client = ControlClient(address, "trainer-1", 10)
    monkeypatch.setattr(control_client, "PROTOCOL", messages.PROTOCOL + 1)
    ours = messages.PROTOCOL
    said = f"trainer-1 speaks version {ours + 1} of the control protocol, the launcher version {ours}"
    with pytest.raises(BadInput, match=said):
        client.ask(Heartbeat(unit=0))
    monkeypatch.undo()
    with zmq.Context() as context, context.socket(zmq.DEALER) as older:  # its requests have no version
        older.connect(address)
        older.send_multipart([b"1", b"anything"])
        assert older.poll(5000)
        assert older.recv_multipart() == [b"1", str(messages.PROTOCOL).encode(), b""]
    assert client.ask(Heartbeat(unit=0)) == Done()
    client.close()


def test_a_node_of_another_protocol_is_refused_by_name(tmp_path):
    (tmp_path / INVITATION).write_text(json.dumps({"run_id": "a", "protocol": 7}))
    with pytest.raises(
        BadInput, match=f"version {messages.PROTOCOL} of the control protocol, the run's launcher version 7"
    ):
        wait_for_invitation(tmp_path, "", 1.0)
    with pytest.raises(DeadlineError):
        wait_for_invitation(tmp_path, "a", 0.1)
    (tmp_path / INVITATION).write_text("{")
    with pytest.raises(BadInput, match="not an invitation to other nodes"):
        wait_for_invitation(tmp_path, "", 1.0)
