"""The trainer's side with several ranks: pipeline stages that send in turn, ranks that only give their shards,
errors of one."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
import pytest
import torch

from engine.client.publish.publisher import ATTEMPTS
from engine.client.publish.transports import open_transport
from engine.errors import WeightSyncError
from engine.launcher.pool.instance_client import InstanceGone
from engine.launcher.weight_sync.sync import WeightSync
from engine.wire import messages
from engine.wire.weights.bucket_file import wire_of
from support.late_communicator import late
from support.weights_double import TIMEOUT_S, Client, Launcher, Model, Verifying, base_folder, publisher, weights

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
    launchers = []

    def publish(transport, versions, names="ab", **faults):
        base = base_folder(tmp_path / f"base{len(launchers)}")
        launchers.append(launcher := Launcher([Client(name, base, faults.get(name)) for name in names]))
        shared = Shared()
        models = []

        def rank(number):
            place = Place(shared, number)
            made = partial(open_transport, transport, TIMEOUT_S, torch.device("cpu"))
            publisher = Verifying(
                connection=launcher,
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
            return launcher, list(threads.map(rank, range(4))), models

    yield publish
    for launcher in launchers:
        launcher.close()


@pytest.mark.parametrize("transport", ["file", "gloo", "late"])
def test_all_stages_arrive_and_one_snapshot_holds_them(run, tmp_path, transport):
    launcher, ended, models = run(transport, [1, 2])
    assert ended == [None] * 4
    for client in launcher.clients:
        assert client.version == 2
        assert all(torch.equal(client.held[name], tensor) for name, tensor in weights(2).items())
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

    launcher = Launcher([Client("a", base_folder(tmp_path / "base"), hear)])
    try:
        sender = publisher(launcher, "gloo", tmp_path)
        sender.publish(Model(1), 1)
    finally:
        launcher.close()
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
    launcher = Launcher([Client("a", base_folder(tmp_path / "base"))])
    try:
        sender = publisher(launcher, "gloo", tmp_path)
        sender.publish(Model(1), 1)
        sender.settle()
        sender.publish(model := Slow(2), 2)
        sender._timeout_s = 0.1
        sender.settle()
        sender._timeout_s = 2 * TIMEOUT_S
        model.held[list(model.held)[-1]].zero_()  # the update
        model.may_go_on.set()
        sender.publish(newest := Slow(3), 3)  # waits for the one before
        shown = visible(tmp_path)
        newest.may_go_on.set()
        sender.settle()
        assert (shown, visible(tmp_path)) == (["version-00000001"], ["version-00000003"])
    finally:
        launcher.close()
    assert "the snapshot of weight version 2 is dropped" in capfd.readouterr().out


@pytest.mark.parametrize("transport", ["gloo", "late"])
def test_an_instance_that_dies_in_the_second_stage_makes_all_ranks_begin_again(run, transport):
    async def die(route, body, count):
        if route == "/update_weights" and body["update_info"].get("stage") == 1:
            raise InstanceGone("its connection broke")

    launcher, ended, models = run(transport, [1], b=die)
    assert ended == [None] * 4
    assert set(launcher.pool.reasons) == {"b"}
    assert all(torch.equal(launcher.clients[0].held[name], tensor) for name, tensor in weights(1).items())
    assert [model.seen for model in models] == [2 * len(STAGES[model.stage]) for model in models]


def test_instances_that_fail_in_every_attempt_end_the_run_by_name(run, monkeypatch):
    """The launcher answers each attempt's first bucket as when an instance has died and others are left."""
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
def test_an_error_of_the_launcher_is_raised_on_all_ranks(run, transport):
    async def corrupt(route, body, count):
        if route == "/update_weights" and body["update_info"].get("stage") == 1:
            return {"update_info": body["update_info"] | {"checksums": ["0" * 16] * len(body["update_info"]["names"])}}
        return None

    _, ended, _ = run(transport, [1], a=corrupt, b=corrupt)
    assert {type(error) for error in ended} == {WeightSyncError}
    assert all("b was corrupted on its way" in str(error) for error in ended)
