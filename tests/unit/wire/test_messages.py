"""The messages of the plane: what crosses, what is refused, and who speaks another protocol."""

import asyncio
import json
import socket
from typing import get_args

import msgspec
import pytest

from engine import errors
from engine.client.connection import Connection
from engine.config import Config
from engine.errors import BadInput, DeadlineError, MetronomeError
from engine.orchestrator.plane import Plane
from engine.orchestrator.pool.instance_client import InstanceGone
from engine.run.folder import RunFolder
from engine.run.trace import Trace
from engine.wire import messages
from engine.wire.invitation import INVITATION, wait_for_invitation
from engine.wire.messages import Failure, Heartbeat, Lease, StillWaiting, pack, read_message, read_request


def test_every_request_and_every_message_is_read_as_what_it_was_sent_as():
    for union, base in ((messages.AnyRequest, messages.Request), (messages.AnyMessage, messages.Message)):
        assert set(get_args(union)) == {kind for kind in vars(messages).values() if is_leaf(kind, base)}
    lease = Lease(step=3, replica_group=1, budget=100, done=(4, 5))
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
        {"type": "Lease", "step": 3},
        {"type": "Lease", "step": "3", "budget": 1},
        {"type": "Lease", "step": 3, "budget": 1, "more": 1},
        {"type": "Nothing"},
        {"step": 3},
        [],
    ],
)
def test_what_is_no_request_is_refused(wrong):
    with pytest.raises(msgspec.ValidationError):
        read_request(msgspec.msgpack.encode(wrong))


def test_a_replay_answers_no_request_about_instances(tmp_path):
    plane = Plane(Config(), RunFolder(tmp_path), Trace(tmp_path / "trace", "orchestrator"))
    with pytest.raises(MetronomeError, match="Lease: a run that replays a record has no instances"):
        asyncio.run(plane.answer(Lease(step=0, replica_group=0, budget=1)))


def test_a_orchestrator_that_does_not_answer_is_named_with_the_request():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        connection = Connection(url, None, "trainer-0", 0.1)
        with pytest.raises(
            DeadlineError, match=f"trainer-0: no answer from the orchestrator at {url} to Heartbeat in 0 s"
        ):
            connection.ask(Heartbeat(replica_group=0))
        connection.close()


def test_a_node_of_another_protocol_is_refused_by_name(tmp_path):
    ours = messages.PROTOCOL
    theirs = ours + 1
    (tmp_path / INVITATION).write_text(json.dumps({"run_id": "a", "protocol": theirs}))
    with pytest.raises(
        BadInput, match=f"version {ours} of the plane's protocol, the run's orchestrator version {theirs}"
    ):
        wait_for_invitation(tmp_path, "", 1.0)
    with pytest.raises(DeadlineError):
        wait_for_invitation(tmp_path, "a", 0.1)
    (tmp_path / INVITATION).write_text("{")
    with pytest.raises(BadInput, match="not an invitation to other nodes"):
        wait_for_invitation(tmp_path, "", 1.0)
