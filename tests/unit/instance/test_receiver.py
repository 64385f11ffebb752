"""What an instance accepts, over files and groups, and what it does when a transfer does not come to its end."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import BadInput, DeadlineError, TransferError
from engine.instance import receiver as receivers
from engine.instance.receiver import EMBEDDING, OUTPUT, PERTURBED, Receiver, StagedVersion
from engine.wire.weights import bucket_file
from engine.wire.weights.buckets import Buffers, pack_buckets
from engine.wire.weights.checksum import tensor_checksum
from engine.wire.weights.groups import Rendezvous, join_group
from support.runs import wait_for
from support.tiny_models import save

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 20.0
"""Deadline of what is not about deadlines, and longest time of what must not take as long as one;
a quiet machine takes 1 s."""
TENSORS = {"a": torch.randn(7, 5), "b": torch.randn(300).bfloat16(), "c": torch.ones(3)}


def packed(limit=10**6):
    return list(pack_buckets(TENSORS.items(), None, limit, Buffers(len(TENSORS), 1.0)))


def filed(folder, **changes):
    """One bucket's update_info over a file."""
    (bucket,) = packed()
    path = folder / "bucket.safetensors"
    info = {"transport": "file", "version": 1, "stage": 0, "bucket": 0, "path": str(path), **bucket.wire()}
    bucket_file.write_bucket(path, bucket)
    return info | changes


def same(found):
    return list(dict(found)) == list(TENSORS) and all(torch.equal(tensor, TENSORS[name]) for name, tensor in found)


def test_a_file_is_received_and_staged(tmp_path):
    receiver = Receiver()
    info = filed(tmp_path)
    assert same(list(receiver.receive(info)))
    receiver.stage(info | {"staged": True})
    for _ in range(2):
        assert same(list(receiver.receive({"transport": "staged", "version": 1})))
    with pytest.raises(BadInput, match="no weights of version 2 were staged"):
        list(receiver.receive({"transport": "staged", "version": 2}))


def test_memory_of_the_version_before_is_used_again_only_while_nothing_is_received_into_it():
    memory = torch.zeros(4, dtype=torch.uint8)
    slow = threading.Event()
    given = []

    def arrive(buffer, wait=False):
        given.append(buffer)
        if wait:
            slow.wait(PATIENCE_S)
        return [], memory

    before = StagedVersion(1, None)
    before.add_bucket(arrive)
    before.add_bucket(partial(arrive, wait=True))
    wait_for(lambda: len(given) == 2, "the second bucket")
    for version, held in ((2, None), (3, memory)):
        late = StagedVersion(version, before)
        late.add_bucket(arrive)
        late.tensors(PATIENCE_S)
        assert (given[-1] is memory) == (held is memory)
        slow.set()
        wait_for(lambda: before.idle(), "the end of the first version")


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checksum": "0" * 32}, "the bucket a … c was corrupted in transit"),
        ({"shapes": [[5, 7], [300], [3]]}, r"a is F32 \[7, 5\], but F32 \[5, 7\] was announced"),
        ({"dtypes": ["float32", "float16", "float32"]}, r"b is BF16 \[300\], but F16"),
        ({"names": ["a", "b", "d"]}, "its tensors differ from those announced; the first that differs is c"),
        ({"path": "/nowhere"}, "cannot be read: No such file"),
    ],
)
def test_what_differs_from_what_was_announced_is_refused_by_name(tmp_path, changes, message, staged):
    receiver = Receiver()
    info = filed(tmp_path, **changes)
    if staged:
        receiver.stage(info)
        info = {"transport": "staged", "version": 1}
    with pytest.raises(BadInput, match=message):
        list(receiver.receive(info))


@pytest.mark.parametrize(
    "changes",
    [
        {"transport": "mpi"},
        {"transport": ["file"]},
        {"path": None},
        {"checksum": None},
        {"checksum": 0},
        {"names": None},
        {"transport": "gloo"},
        {"transport": "nccl"},
        {"transport": None, "path": 3},
        {"transport": "staged"},
        {"transport": "base", "perturb": "all"},
        {"transport": "base", "perturb": [-1]},
        {"transport": "base"},
    ],
)
def test_malformed_messages_are_refused(tmp_path, changes):
    with pytest.raises(BadInput):
        list(Receiver().receive(filed(tmp_path, **changes)))
    for version in (None, -1, 1.0):
        with pytest.raises(BadInput, match="version"):
            Receiver().stage(filed(tmp_path, version=version))


INIT = {"transport": "gloo", "stages": [{"host": "127.0.0.1", "port": 1}], "rank": 1, "world_size": 2, "timeout_s": 0.2}


@pytest.mark.parametrize(
    "changes",
    [
        {"transport": "file"},
        {"transport": ["gloo"]},
        {"transport": "nccl"},
        {"stages": []},
        {"stages": [1]},
        {"stages": [{"host": "127.0.0.1"}]},
        {"rank": 0},
        {"rank": 2},
        {"world_size": "2"},
        {"timeout_s": 0},
        {"timeout_s": None},
        {"stages": [{"host": 3, "port": 1}]},
    ],
)
def test_malformed_meetings_are_refused(changes):
    with pytest.raises(BadInput):
        Receiver().connect(INIT | changes)


def test_a_sender_that_is_not_there_is_named_in_time():
    began = time.monotonic()
    with pytest.raises((TransferError, DeadlineError), match=r"sender of the weights at 127.0.0.1:1"):
        Receiver().connect(INIT)
    assert time.monotonic() - began < PATIENCE_S


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True}])
def test_the_self_tests_weights_are_the_base_but_for_the_output_rows(tmp_path, settings):
    folder = Path(save(tmp_path / "model", shard="10KB", **settings))
    base = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    found = {
        name: tensor.clone() for name, tensor in Receiver().receive({"transport": "base", "perturb": [3, 60]}, folder)
    }
    output = EMBEDDING if settings else OUTPUT
    assert found.keys() == base.keys()
    assert [name for name in base if not torch.equal(found[name], base[name])] == [output]
    changed = (found[output] != base[output]).any(1).nonzero().flatten().tolist()
    assert changed == [3, 60]
    assert torch.equal(found[output][3], PERTURBED * base[output][3])
    restored = Receiver().receive({"transport": "base", "perturb": []}, folder)
    assert all(torch.equal(tensor, base[name]) for name, tensor in restored)
    with pytest.raises(BadInput, match="token 61, but .* has 61 rows"):
        list(Receiver().receive({"transport": "base", "perturb": [61]}, folder))


# groups -------------------------------------------------------------------------------------------


@pytest.fixture
def group():
    """A sender's group and two receivers in it, in threads of this process."""
    meeting = Rendezvous("127.0.0.1", "gloo", PATIENCE_S)
    receivers = [Receiver(), Receiver()]
    info = {"transport": "gloo", "generation": 1, "stages": [meeting.address], "world_size": 3, "timeout_s": PATIENCE_S}
    with ThreadPoolExecutor(4) as threads:
        joined = [threads.submit(receiver.connect, info | {"rank": 1}, rank) for rank, receiver in enumerate(receivers)]
        made = meeting.gather(3)
        for one in joined:
            one.result(PATIENCE_S)
        yield made, receivers, threads
        for one in (made, *receivers):
            one.close()


def wires(limit):
    return [
        (bucket, {"transport": "gloo", "version": 1, "stage": 0, "bucket": bucket.number, **bucket.wire()})
        for bucket in packed(limit)
    ]


@pytest.mark.parametrize("staged", [False, True])
def test_buckets_are_broadcast_to_all(group, staged):
    sender, receivers, threads = group
    found = [[], []]
    for bucket, info in wires(150):
        if staged:
            for receiver in receivers:
                receiver.stage(info)
        receptions = (
            []
            if staged
            else [
                threads.submit(lambda one=one, info=info: [(name, t.clone()) for name, t in one.receive(info)])
                for one in receivers
            ]
        )
        sender.broadcast(*bucket.pieces()).wait()
        for held, reception in zip(found, receptions, strict=False):
            held += reception.result(PATIENCE_S)
    if staged:
        found = [list(receiver.receive({"transport": "staged", "version": 1})) for receiver in receivers]
    assert all(same(one) for one in found)


class OnDevice(torch.Tensor):
    """Says that it is on a device, which this machine need not have."""

    device = property(lambda self: torch.device("cuda", 0))


def test_what_is_staged_lies_in_host_memory_where_transfers_arrive_on_a_device(group, monkeypatch):
    sender, (receiver, other), threads = group
    room = receivers._sized_buffer
    monkeypatch.setattr(
        receivers,
        "_sized_buffer",
        lambda buffer, nbytes, device: (
            room(buffer, nbytes, device)
            if device.type == "cpu"
            else torch.empty(nbytes, dtype=torch.uint8).as_subclass(OnDevice)
        ),
    )
    monkeypatch.setattr(
        receivers,
        "tensor_checksum",
        lambda *tensors: tensor_checksum(*(tensor.as_subclass(torch.Tensor) for tensor in tensors)),
    )
    for version, limit in ((1, 150), (2, 700)):
        receiver._groups[0].device = torch.device("cuda", 0)
        for bucket, info in wires(limit):
            receiver.stage(info | {"version": version})
            other.stage(info | {"version": version})
            sender.broadcast(*bucket.pieces()).wait()
        found = list(receiver.receive({"transport": "staged", "version": version}))
        assert same(found)
        assert {type(tensor) for _, tensor in found} == {torch.Tensor}


def test_closing_calls_off_whoever_waits(group):
    sender, receivers, threads = group
    ((bucket, info),) = wires(10**6)
    receptions = [threads.submit(lambda one=one: list(one.receive(info))) for one in receivers]
    time.sleep(0.1)
    began = time.monotonic()
    for receiver, reception in zip(receivers, receptions, strict=True):
        receiver.close()
        with pytest.raises(TransferError, match="closed"):
            reception.result(PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S / 2
    sender.close()
    with pytest.raises(TransferError, match="closed"):
        sender.broadcast(*bucket.pieces())


def test_a_meeting_that_is_called_off_ends_for_all():
    meeting = Rendezvous("127.0.0.1", "gloo", PATIENCE_S)
    with ThreadPoolExecutor(2) as threads:
        gathering = threads.submit(meeting.gather, 3)  # the third never comes
        joining = threads.submit(join_group, meeting.address, 1, 3, "gloo", PATIENCE_S, threading.Event())
        time.sleep(0.1)
        began = time.monotonic()
        meeting.call_off()
        for one in (gathering, joining):
            with pytest.raises(TransferError, match="was cancelled"):
                one.result(PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S / 2


def test_who_does_not_come_in_time_is_named():
    with pytest.raises(DeadlineError, match="rank 1 of the weight transfer did not arrive within 0.2 s"):
        Rendezvous("127.0.0.1", "gloo", 0.2).gather(2)


MEMBER = """
import sys, threading, torch
from engine.wire.weights.groups import join_group
group = join_group({"host": "127.0.0.1", "port": int(sys.argv[1])}, 1, 2, "gloo", 60.0, threading.Event())
print("in", flush=True)
sys.stdin.read()
"""


def test_a_process_that_is_killed_in_a_broadcast_fails_it_at_once_and_one_that_stands_still_by_the_deadline():
    meeting = Rendezvous("127.0.0.1", "gloo", 3.0)
    member = subprocess.Popen(
        [sys.executable, "-c", MEMBER, str(meeting.address["port"])],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        # the member's start takes longer than the transfers' deadline
        meeting._timeout_s = 60.0  # seconds, as for MEMBER
        group = meeting.gather(2)
        assert member.stdout.readline() == "in\n"
        group._timeout_s = 1.0
        began = time.monotonic()
        with pytest.raises(DeadlineError, match="not transferred within 1 s"):
            group.broadcast(torch.zeros(64 * 2**20, dtype=torch.uint8)).wait()
        assert 0.9 < time.monotonic() - began < PATIENCE_S
        group._timeout_s = 2 * PATIENCE_S
        transfer = group.broadcast(torch.zeros(64 * 2**20, dtype=torch.uint8))
        member.kill()
        began = time.monotonic()
        with pytest.raises(TransferError, match="a member of the weight transfer failed"):
            transfer.wait()
        assert time.monotonic() - began < PATIENCE_S
        group.close()
    finally:
        member.kill()
        member.wait()


def test_it_needs_nothing_but_torch_safetensors_and_the_standard_library():
    """It also runs in vLLM's environment."""
    code = (
        "import sys; import engine.instance.receiver; "
        "print([m for m in ('pydantic', 'megatron', 'aiohttp', 'zmq', 'transformers', 'msgpack') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout == "[]\n", done.stdout + done.stderr
