"""Weight syncs over a communicator that connects late, as NCCL's and HCCL's do: no first bucket may wait for it."""

import asyncio
import contextlib
import threading
import time
from functools import partial

import pytest
import torch

from engine.errors import BadInput, DeadlineError, TransferError
from engine.orchestrator.pool.instance_client import InstanceGone
from engine.wire.weights.groups import Rendezvous, join_group
from support.late_communicator import late
from support.weights_double import TIMEOUT_S, Model, base_folder, publisher, starting, weights

HOST = torch.device("cpu")
PATIENCE_S = 3 * TIMEOUT_S


@pytest.fixture(params=["eager", "first broadcast"])
def backend(monkeypatch, request):
    """NCCL's way, and HCCL's."""
    yield from late(monkeypatch, eager=request.param == "eager")


@pytest.fixture
def start(tmp_path):
    yield from starting(base_folder(tmp_path / "base"))


def holds(client, version):
    return client.version == version and all(
        torch.equal(client.held[name], tensor) for name, tensor in weights(version).items()
    )


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("staged", [False, True])
def test_all_instances_get_every_version(start, backend, tmp_path, count, staged):
    orchestrator = start(count, staged=staged)
    sender = publisher(orchestrator, "late", tmp_path)
    for version in (1, 2):
        sender.publish(Model(version), version)
    assert all(holds(client, 2) for client in orchestrator.clients)
    assert not orchestrator.reasons
    assert len(backend.made) == 1 + count  # the groups of the first version serve the second, too
    assert all(group.device == HOST for group in backend.made)


@pytest.mark.parametrize("staged", [False, True])
def test_a_member_that_dies_while_it_connects_is_left_out_and_the_others_connect_anew(start, backend, tmp_path, staged):
    backend.dies = 2

    async def die(route, body, count):
        """Its process was there, and began to connect."""
        if route == "/init_weight_transfer_engine":
            connecting = orchestrator.clients[1].receiver.connect
            threading.Thread(target=suppressed, args=(connecting, body["init_info"]), daemon=True).start()
            await until(lambda: len(backend.made) == 3)
            backend.dies = None
            raise InstanceGone("its connection broke")

    orchestrator = start(2, staged=staged, b=die)
    began = time.monotonic()
    publisher(orchestrator, "late", tmp_path).publish(Model(1), 1)
    assert holds(orchestrator.clients[0], 1)
    assert set(orchestrator.reasons) == {"b"}
    assert time.monotonic() - began < PATIENCE_S


def suppressed(act, *arguments):
    with contextlib.suppress(TransferError):
        act(*arguments)


async def until(holds):
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.01)


def members(backend, world, timeout_s, device=HOST):
    """The end of each member's attempt to be in a group, by rank, and what calls it off."""
    meeting = Rendezvous("127.0.0.1", backend, timeout_s, device)
    off = threading.Event()
    ended = {}
    joined = partial(
        join_group, meeting.address, world=world, backend=backend, timeout_s=timeout_s, off=off, device=device
    )

    def member(rank):
        try:
            ended[rank] = joined(rank) if rank else meeting.gather(world)
        except Exception as error:
            ended[rank] = error

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    return meeting, off, threads, ended


def test_a_connection_that_is_not_made_in_time_says_what_it_waited_for(backend):
    backend.dies = 2
    _, _, threads, ended = members("late", 3, 8.0)  # long enough that all have come, also on a busy machine
    for thread in threads:
        thread.join(PATIENCE_S)
    first = next(error for error in ended.values() if isinstance(error, DeadlineError))
    assert str(first) == "the weight transfer waited 8 s for the 3 members to connect over late"
    assert len(ended) == 3
    assert {type(error) for error in ended.values()} <= {DeadlineError, TransferError}


@pytest.mark.parametrize("by_sender", [False, True])
def test_a_connection_can_be_called_off(backend, by_sender):
    backend.dies = 2
    meeting, off, threads, ended = members("late", 3, 60.0)
    while len(backend.made) < 3:
        time.sleep(0.01)
    began = time.monotonic()
    meeting.call_off()
    off.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S
    assert all(isinstance(ended[rank], TransferError) for rank in range(3))


def test_a_member_that_cannot_make_its_group_ends_the_wait_of_the_others(backend):
    make = backend.make

    def refuse(place):
        if place.rank == 2:
            raise BadInput("this process has no such backend")
        return make(place)

    backend.make = refuse
    began = time.monotonic()
    _, _, threads, ended = members("late", 3, 60.0)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S
    assert [type(ended[rank]) for rank in range(3)] == [TransferError, TransferError, BadInput]


def test_what_connects_after_it_was_given_up_is_aborted(backend):
    backend.dies = 1
    _, _, threads, ended = members("late", 2, 0.3)
    for thread in threads:
        thread.join(PATIENCE_S)
    began = time.monotonic()
    while not all(group.aborted.is_set() for group in backend.made):
        assert time.monotonic() - began < PATIENCE_S
        time.sleep(0.01)


def test_a_broadcast_returns_before_the_others_call_theirs(backend):
    _, _, threads, ended = members("late", 2, PATIENCE_S)
    for thread in threads:
        thread.join(PATIENCE_S)
    piece = torch.arange(9, dtype=torch.uint8)
    sent = ended[0].broadcast(piece)
    room = torch.zeros_like(piece)
    ended[1].broadcast(room).wait()
    sent.wait()
    assert torch.equal(room, piece)
    for group in ended.values():
        group.close()
