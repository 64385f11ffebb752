"""The trainer's side with several ranks: pipeline stages that send in turn, ranks that only give their shards,
errors of one."""

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from engine.client.publish import host_copies
from engine.client.publish.publisher import ATTEMPTS
from engine.client.publish.transports import open_transport
from engine.errors import WeightSyncError
from engine.orchestrator.pool.instance_client import InstanceGone
from engine.orchestrator.weight_sync.sync import WeightSync
from engine.wire import messages
from engine.wire.weights import bucket_file
from engine.wire.weights.bucket_file import wire_of
from support.late_communicator import late
from support.runs import wait_for
from support.weights_double import TIMEOUT_S, Client, Model, Orchestrator, Verifying, base_folder, publisher, weights

STAGES = (("lm_head.weight", "a"), ("b", "c", "d"))


class Place:
    """A rank's side of engine.ranks.rank_group.RankGroup, all ranks being threads here."""

    def __init__(self, shared, number):
        self._shared = shared
        self._number = number
        self.stage = divmod(number, 2)[0]
        self.writes = number % 2 == 0
        self.exports = True

    def gather(self, message):
        shared = self._shared
        shared.told[self._number] = message
        shared.barrier.wait(20)
        told = [shared.told[number] for number in range(4)]
        shared.barrier.wait(20)
        return told

    def from_first(self, act):
        outcome = {}
        if self._number == 0:
            try:
                outcome = {"result": act()}
            except Exception as error:
                outcome = {"error": error}
        outcome = self.gather(outcome)[0]
        if "error" in outcome:
            raise outcome["error"]
        return outcome["result"]


class Shared:
    def __init__(self):
        self.told = {}
        self.barrier = threading.Barrier(4)


class Stage(Model):
    """One stage's part; only the last one's ranks know the probe's log-probabilities.
    Both ranks of a stage go through it."""

    def __init__(self, seed, stage):
        super().__init__(seed)
        self.stage = stage
        self.seen = 0

    def tensors(self):
        for name in STAGES[self.stage]:
            self.seen += 1
            yield name, self.held[name]

    def probe(self, token_ids):
        return super().probe(token_ids) if self.stage == 1 else []


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    """Transport "late" connects as NCCL does."""
    yield from late(monkeypatch)


@pytest.fixture
def run(tmp_path):
    """Publish versions from four ranks (two stages of two); what each rank's publish returned or raised."""
    orchestrators = []

    def publish(transport, versions, names="ab", **faults):
        base = base_folder(tmp_path / f"base{len(orchestrators)}")
        orchestrators.append(orchestrator := Orchestrator([Client(name, base, faults.get(name)) for name in names]))
        shared = Shared()
        models = []

        def rank(number):
            place = Place(shared, number)
            made = partial(open_transport, transport, TIMEOUT_S, torch.device("cpu"))
            publisher = Verifying(
                connection=orchestrator,
                ranks=place,
                transport=made,
                folder=tmp_path / "weights",
                dtype=torch.float32,
                bucket_bytes=2000,
                timeout_s=2 * TIMEOUT_S,
            )
            for version in versions:
                models.append(model := Stage(version, place.stage))
                try:
                    publisher.publish(model, version)
                except Exception as error:
                    return error
            publisher._end_last_attempt()
            return None

        with ThreadPoolExecutor(4) as threads:
            return orchestrator, list(threads.map(rank, range(4))), models

    yield publish
    for orchestrator in orchestrators:
        orchestrator.close()


@pytest.mark.parametrize("transport", ["file", "gloo", "late"])
def test_all_stages_arrive_and_one_snapshot_holds_them(run, tmp_path, transport):
    orchestrator, ended, models = run(transport, [1, 2])
    assert ended == [None] * 4
    for client in orchestrator.clients:
        assert client.version == 2
        assert all(torch.equal(client.held[name], tensor) for name, tensor in weights(2).items())
    assert visible(tmp_path) == (["version-00000002"] if transport == "file" else [])
    orchestrator.catch_up(late := orchestrator.late()).result(10)
    assert all(torch.equal(late.client.held[name], tensor) for name, tensor in weights(2).items())
    (folder,) = (tmp_path / "weights").glob("version-????????")
    assert folder.name == "version-00000002"
    names = [name for path in sorted(folder.glob("*.safetensors")) for name in wire_of(path)["names"]]
    assert names == [name for stage in STAGES for name in stage]
    assert all(model.seen == len(STAGES[model.stage]) for model in models)


def test_instances_are_told_each_bucket_of_a_transport_with_groups(tmp_path):
    told = []

    async def hear(route, body, count):
        if route == "/update_weights" and body["update_info"]["transport"] == "gloo":
            told.append(body["update_info"])

    orchestrator = Orchestrator([Client("a", base_folder(tmp_path / "base"), hear)])
    try:
        sender = publisher(orchestrator, "gloo", tmp_path)
        sender.publish(Model(1), 1)
    finally:
        orchestrator.close()
    assert [info["bucket"] for info in told] == [0, 1, 2]
    assert told == [msgspec.to_builtins(info) for info in sender._sending]


class Slow(Model):
    """Its second gathering, the snapshot's, comes to a stop before its last tensor until it may go on."""

    def __init__(self, seed):
        super().__init__(seed)
        self.gathered = 0
        self.may_go_on = threading.Event()

    def tensors(self):
        self.gathered += 1
        for name, tensor in self.held.items():
            if self.gathered == 2 and name == list(self.held)[-1]:
                assert self.may_go_on.wait(20)
            yield name, tensor


def visible(tmp_path):
    return [folder.name for folder in (tmp_path / "weights").glob("version-????????")]


def test_a_snapshot_that_outlives_its_parameters_is_never_shown_as_whole(tmp_path, capfd):
    orchestrator = Orchestrator([Client("a", base_folder(tmp_path / "base"))])
    try:
        sender = publisher(orchestrator, "gloo", tmp_path)
        sender.publish(model := Slow(2), 2)
        catching_up = orchestrator.catch_up(late := orchestrator.late())
        sender._timeout_s = 0.1
        sender.settle()
        sender._timeout_s = 2 * TIMEOUT_S
        model.held[list(model.held)[-1]].zero_()  # the update
        model.may_go_on.set()
        sender.publish(newest := Slow(3), 3)  # waits for the one before
        assert visible(tmp_path) == []
        assert not catching_up.done()
        newest.may_go_on.set()
        sender.settle()
        catching_up.result(10)
        assert visible(tmp_path) == ["version-00000003"]
        assert all(torch.equal(late.client.held[name], tensor) for name, tensor in weights(3).items())
    finally:
        orchestrator.close()
    assert "the snapshot of weight version 2 is dropped" in capfd.readouterr().out


@pytest.fixture
def slow_files(monkeypatch):
    """A file system on which every file takes as long as one wants: until the event is set."""
    event = threading.Event()
    write = bucket_file.write_bucket

    def slow(*arguments):
        assert event.wait(20)
        write(*arguments)

    monkeypatch.setattr(bucket_file, "write_bucket", slow)
    yield event
    event.set()


@pytest.mark.parametrize("shared", [False, True])
def test_no_sync_waits_for_the_files_of_a_late_instance_which_then_gets_the_newest_version(
    tmp_path, slow_files, shared
):
    orchestrator = Orchestrator([Client("a", base_folder(tmp_path / "base"))])
    try:
        sender = publisher(orchestrator, "gloo", tmp_path, shared=shared)
        sender.publish(Model(1), 1)
        sender.settle()
        catching_up = orchestrator.catch_up(late := orchestrator.late())
        wait_for(lambda: list((tmp_path / "weights").glob("*.partial")), "the first file of the snapshot")
        for version in (2, 3, 4):
            assert sender.publish(model := Model(version), version) < TIMEOUT_S / 2
            sender.settle()
            for tensor in model.held.values():
                tensor.zero_()  # the update
        assert not catching_up.done()
        slow_files.set()
        catching_up.result(10)
        assert all(torch.equal(late.client.held[name], tensor) for name, tensor in weights(4).items())
    finally:
        orchestrator.close()


@pytest.mark.parametrize("shared", [False, True])
def test_the_version_before_stays_until_the_next_one_is_whole(tmp_path, shared):
    """The only instance dies in the middle of version 2. One that comes loads version 1 and gets the next attempt."""

    async def die(route, body, count):
        if route == "/update_weights" and (body["update_info"].get("version"), body["update_info"].get("bucket")) == (
            2,
            1,
        ):
            raise InstanceGone("its connection broke")

    orchestrator = Orchestrator([Client("a", base_folder(tmp_path / "base"), die)])
    try:
        sender = publisher(orchestrator, "gloo", tmp_path, shared=shared)
        sender.publish(Model(1), 1)
        sender.settle()
        late = orchestrator.late()
        held = []

        async def wait_for_member():
            if not orchestrator.pool.members():
                await orchestrator.sync.catch_up(late)
                held.append({name: tensor.clone() for name, tensor in late.client.held.items()})
                orchestrator.pool.late.discard(late)

        orchestrator.pool.wait_for_member = wait_for_member
        sender.publish(Model(2), 2)
        assert set(orchestrator.pool.reasons) == {"a"}
        for found, version in ((held[0], 1), (late.client.held, 2)):
            assert all(torch.equal(found[name], tensor) for name, tensor in weights(version).items())
    finally:
        orchestrator.close()


@pytest.mark.parametrize("at", ["its files", "its end"])
def test_a_snapshot_that_cannot_be_written_is_written_later_and_the_run_goes_on(at, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(host_copies, "AGAIN_S", 0.1)
    full = [at == "its end"]

    def touch(path, *args, **named):
        if full and full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return touched(path, *args, **named)

    touched = Path.touch
    monkeypatch.setattr(Path, "touch", touch)
    orchestrator = Orchestrator([Client("a", base_folder(tmp_path / "base"))])
    try:
        sender = publisher(orchestrator, "gloo", tmp_path)
        sender.publish(Model(1), 1)
        if at == "its files":
            (tmp_path / "weights").write_text("no folder")
        catching_up = orchestrator.catch_up(late := orchestrator.late())
        words = "late instances wait for the snapshot of weight version 1: "
        said = []
        wait_for(lambda: said.append(capfd.readouterr().out) or words in "".join(said), "the message")
        full.clear()
        if at == "its files":
            (tmp_path / "weights").unlink()
        catching_up.result(10)
        assert all(torch.equal(late.client.held[name], tensor) for name, tensor in weights(1).items())
    finally:
        orchestrator.close()


@pytest.mark.parametrize("transport", ["gloo", "late"])
def test_an_instance_that_dies_in_the_second_stage_makes_all_ranks_begin_again(run, transport):
    async def die(route, body, count):
        if route == "/update_weights" and body["update_info"].get("stage") == 1:
            raise InstanceGone("its connection broke")

    orchestrator, ended, models = run(transport, [1], b=die)
    assert ended == [None] * 4
    assert set(orchestrator.pool.reasons) == {"b"}
    assert all(torch.equal(orchestrator.clients[0].held[name], tensor) for name, tensor in weights(1).items())
    assert [model.seen for model in models] == [2 * len(STAGES[model.stage]) for model in models]


def test_instances_that_fail_in_every_attempt_end_the_run_by_name(run, monkeypatch):
    """The orchestrator answers each attempt's first bucket as when an instance has died and others are left."""
    begun = []

    async def died(self, request):
        begun.append(request.info.stage)
        return messages.Proceed(retry=True)

    monkeypatch.setattr(WeightSync, "bucket", died)
    _, ended, models = run("gloo", [1])
    wanted = f"weight version 1 could not be sent: instances failed in each of {ATTEMPTS} attempts"
    assert [str(error) for error in ended] == [wanted] * 4
    assert len(begun) >= ATTEMPTS
    assert set(begun) == {0}


@pytest.mark.parametrize("transport", ["file", "gloo"])
def test_an_error_of_the_orchestrator_is_raised_on_all_ranks(run, transport):
    async def corrupt(route, body, count):
        if route == "/update_weights" and body["update_info"].get("stage") == 1:
            return {"update_info": body["update_info"] | {"checksums": ["0" * 16] * len(body["update_info"]["names"])}}
        return None

    _, ended, _ = run(transport, [1], a=corrupt, b=corrupt)
    assert {type(error) for error in ended} == {WeightSyncError}
    assert all("b was corrupted in transit" in str(error) for error in ended)
