"""The trainer's side with several ranks: pipeline stages that send in turn, ranks that only give their shards,
errors of one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.client.publish.publisher import ATTEMPTS, SendPipeline
from engine.client.publish.transports import open_transport
from engine.errors import WeightSyncError
from engine.orchestrator.pool.instance_client import InstanceGone
from engine.orchestrator.publish.publishes import Publishes
from engine.wire import messages
from support.late_communicator import late
from support.weights_double import TIMEOUT_S, Client, Model, Orchestrator, Verifying, base_folder, publisher, weights

STAGES = (("lm_head.weight", "a"), ("b", "c", "d"))


class Place:
    """A rank's side of engine.trainer.ranks.rank_group.RankGroup, all ranks being threads here."""

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
            publisher = Verifying(
                connection=orchestrator,
                ranks=place,
                transport=open_transport(transport, TIMEOUT_S, torch.device("cpu"), tmp_path / "weights"),
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
            return None

        with ThreadPoolExecutor(4) as threads:
            return orchestrator, list(threads.map(rank, range(4))), models

    yield publish
    for orchestrator in orchestrators:
        orchestrator.close()


@pytest.mark.parametrize("transport", ["file", "gloo", "late"])
def test_all_stages_arrive(run, tmp_path, transport):
    orchestrator, ended, models = run(transport, [1, 2])
    assert ended == [None] * 4
    for client in orchestrator.clients:
        assert client.version == 2
        assert all(torch.equal(client.held[name], tensor) for name, tensor in weights(2).items())
    names = [file.name for file in sorted((tmp_path / "weights").glob("*"))]
    assert {name[:9] for name in names} == ({"stage-000", "stage-001"} if transport == "file" else set())
    assert all(model.seen == len(STAGES[model.stage]) for model in models)


def test_instances_are_told_each_bucket_of_a_transport_with_groups(tmp_path):
    told = []

    async def hear(route, body, count):
        if route == "/update_weights" and body["update_info"]["transport"] == "gloo":
            told.append(body["update_info"])

    orchestrator = Orchestrator([Client("a", base_folder(tmp_path / "base"), hear)])
    try:
        publisher(orchestrator, "gloo", tmp_path).publish(Model(1), 1)
    finally:
        orchestrator.close()
    assert [info["bucket"] for info in told] == [0, 1, 2, 3]


@pytest.mark.parametrize("transport", ["gloo", "late"])
def test_an_instance_that_dies_in_the_second_stage_makes_all_ranks_begin_again(run, transport):
    async def die(route, body, count):
        if route == "/update_weights" and body["update_info"].get("stage") == 1:
            raise InstanceGone("its connection broke")

    orchestrator, ended, models = run(transport, [1], b=die)
    assert ended == [None] * 4
    assert set(orchestrator.reasons) == {"b"}
    assert all(torch.equal(orchestrator.clients[0].held[name], tensor) for name, tensor in weights(1).items())
    assert [model.seen for model in models] == [2 * len(STAGES[model.stage]) for model in models]


def test_instances_that_fail_in_every_attempt_end_the_run_by_name(run, monkeypatch):
    """The orchestrator answers each attempt's first bucket as when an instance has died and others are left."""
    begun = []

    async def died(self, request):
        begun.append(request.info.stage)
        return messages.Proceed(retry=True)

    monkeypatch.setattr(Publishes, "send", died)
    _, ended, models = run("gloo", [1])
    wanted = f"weight version 1 could not be sent: instances failed in each of {ATTEMPTS} attempts"
    assert [str(error) for error in ended] == [wanted] * 4
    assert len(begun) >= ATTEMPTS
    assert set(begun) == {0}


@pytest.mark.parametrize("transport", ["file", "gloo"])
def test_an_error_of_the_orchestrator_is_raised_on_all_ranks(run, transport):
    async def corrupt(route, body, count):
        if route == "/update_weights" and body["update_info"].get("stage") == 1:
            return {"update_info": body["update_info"] | {"checksum": "0" * 32}}
        return None

    _, ended, _ = run(transport, [1], a=corrupt, b=corrupt)
    assert {type(error) for error in ended} == {WeightSyncError}
    assert all("b was corrupted in transit" in str(error) for error in ended)


def test_after_an_error_no_bucket_is_under_way_and_none_is_begun():
    """The next attempt may begin at once: a bucket that were sent then would fall into it."""
    goes_on = threading.Event()
    written, sent, released = [], [], []

    def write(bucket, info):
        written.append(bucket)
        if bucket == 2:
            raise OSError("no space left")

    def send(bucket, info):
        if bucket == 1:
            goes_on.wait(10)
        if bucket == 6:
            raise OSError("the instance is gone")
        sent.append(bucket)

    steps = SendPipeline([write, send], released.append, timeout_s=10)
    for bucket in range(5):
        steps.put_bucket(bucket, None)
    threading.Timer(0.3, goes_on.set).start()
    with pytest.raises(OSError, match="no space left"):
        steps.wait_for_steps()
    assert sent == [0, 1]
    assert written == [0, 1, 2]
    assert sorted(released) == [0, 1, 2, 3, 4]
    steps.restart_steps()
    steps.put_bucket(5, None)
    steps.wait_for_steps()
    assert sent == [0, 1, 5]
    steps.put_bucket(6, None)
    with pytest.raises(OSError, match="the instance is gone"):
        steps.wait_for_steps()
    steps.put_bucket(7, None)  # nobody would send it
    with pytest.raises(OSError, match="the instance is gone"):
        steps.wait_for_steps()
    assert written == [0, 1, 2, 5, 6]
