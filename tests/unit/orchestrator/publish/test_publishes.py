"""Weight syncs from the trainer's publisher to instances, with every way in which an instance or a bucket may fail."""

import asyncio
import time

import pytest
import torch

from engine.errors import MetronomeError, ProcessDied, WeightSyncError
from engine.instance.receiver import OUTPUT
from engine.orchestrator.pool.instance_client import InstanceFault, InstanceGone
from engine.orchestrator.publish.probe import make_probe
from engine.wire.messages import ConnectSync, MeetingPlace, OpenSync
from support.weights_double import TIMEOUT_S, Model, base_folder, publisher, starting, weights


@pytest.fixture
def start(tmp_path):
    yield from starting(base_folder(tmp_path / "base"))


def holds(client, seed, version):
    same = all(torch.equal(client.held[name], tensor) for name, tensor in weights(seed).items())
    return same and client.version == version and not client.paused


def on(route, number, act):
    """A fault at the so manieth call of a route."""

    async def fault(called, body, count):
        return await act(body) if called == route and count == number else None

    return fault


async def die(body):
    raise InstanceGone("its connection broke")


async def err(body):
    raise InstanceFault("answered 500")


async def hang(body):
    await asyncio.sleep(3600)


async def corrupt(body):
    return {"update_info": body["update_info"] | {"checksum": "0" * 32}}


UPDATE = "/update_weights"
BEGIN = "/begin_weight_update"
FINISH = "/finish_weight_update"
AFTER_TEST = 2  # the self-test's comes first


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("transport", ["file", "gloo"])
def test_every_instance_holds_exactly_what_the_trainer_has(start, tmp_path, transport, staged):
    orchestrator = start(2, staged)
    sender = publisher(orchestrator, transport, tmp_path)
    for version in (0, 1, 2):
        before = {client.name: len(client.calls) for client in orchestrator.clients}
        assert 0 < sender.publish(Model(version), version) < TIMEOUT_S
        assert all(holds(client, version, version) for client in orchestrator.clients)
        assert orchestrator.publishes.version == version
    assert all(one.state == "serving" and one.version == 2 for one in orchestrator.pool.instances)
    assert not orchestrator.reasons
    for client in orchestrator.clients:
        assert client.calls.count(UPDATE) == 1 + 3 * (4 + staged)  # buckets: output layer, a and b, c, d
        assert client.calls.count("/init_weight_transfer_engine") == (transport == "gloo")
        beside = [route for route in client.calls[before[client.name] :] if route != UPDATE]
        assert sorted(beside) == [BEGIN, FINISH, "/health"]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("transport", ["file", "gloo"])
def test_a_late_instance_gets_the_version_again_and_the_others_are_not_touched(start, tmp_path, transport, staged):
    orchestrator = start(2, staged)
    sender = publisher(orchestrator, transport, tmp_path)
    sender.publish(Model(1), 1)
    assert not orchestrator.publishes.is_awaited
    late = orchestrator.late()
    assert orchestrator.publishes.is_awaited
    calls = [len(client.calls) for client in orchestrator.clients[:2]]
    sender.publish(Model(1), 1, again=True)
    assert [len(client.calls) for client in orchestrator.clients[:2]] == calls
    assert holds(late.client, 1, 1)
    assert (late.state, late.version, late.client.trusted) == ("serving", 1, True)
    assert not orchestrator.publishes.is_awaited
    sender.publish(Model(2), 2)  # the groups are made anew, with it
    assert all(holds(client, 2, 2) for client in orchestrator.clients)


@pytest.mark.parametrize("transport", ["file", "gloo"])
@pytest.mark.parametrize("fault", [on(UPDATE, AFTER_TEST, die), on(UPDATE, AFTER_TEST, corrupt)])
def test_a_late_instance_that_fails_harms_no_run_that_has_others(start, tmp_path, transport, fault):
    """It is not asked again for this version, and the trainer does not wait for it."""
    orchestrator = start(1)
    sender = publisher(orchestrator, transport, tmp_path)
    sender.publish(Model(1), 1)
    late = orchestrator.late(fault)
    sender.publish(Model(1), 1, again=True)
    assert set(orchestrator.reasons) == {"late"}
    late.wait_for_weights()
    assert not orchestrator.publishes.is_awaited
    assert holds(orchestrator.clients[0], 1, 1)
    sender.publish(Model(2), 2)
    assert all(holds(client, 2, 2) for client in orchestrator.clients)


@pytest.mark.parametrize("transport", ["file", "gloo"])
def test_the_only_instance_gets_the_version_again_however_often_it_fails(start, tmp_path, transport):
    orchestrator = start(1)
    sender = publisher(orchestrator, transport, tmp_path)
    sender.publish(Model(1), 1)
    orchestrator.pool.instances.clear()
    late = orchestrator.late(on(FINISH, AFTER_TEST, die))
    sender.publish(Model(1), 1, again=True)
    assert set(orchestrator.reasons) == {"late"}
    late.wait_for_weights()
    assert orchestrator.publishes.is_awaited
    sender.publish(Model(1), 1, again=True)
    assert holds(late.client, 1, 1)


BOTH = [("file", False), ("file", True), ("gloo", False), ("gloo", True)]
"""Transport, and whether weights are staged."""
LEFT_OUT = [
    *((*how, UPDATE, number, die, "its connection broke") for how in BOTH for number in (AFTER_TEST, AFTER_TEST + 1)),
    *((*how, "/health", 1, die, "its connection broke") for how in BOTH),
    *((*how, BEGIN, AFTER_TEST, die, "its connection broke") for how in BOTH),
    *((*how, "/init_weight_transfer_engine", 1, die, "its connection broke") for how in BOTH[2:]),
    *((*how, UPDATE, AFTER_TEST + 1, corrupt, "the bucket a … b was corrupted in transit") for how in BOTH),
    ("file", False, UPDATE, 1, hang, "/update_weights answered 503: b: no answer (self-test)"),
    ("file", False, BEGIN, AFTER_TEST, hang, "no answer (weight version 5)"),
    ("file", False, UPDATE, AFTER_TEST, hang, "no answer (weight version 5, bucket 0 of stage 0)"),
    ("file", False, FINISH, AFTER_TEST, hang, "no answer (weight version 5)"),
    *(("gloo", "in turn", BEGIN, AFTER_TEST, act, said) for act, said in ((die, "its connection"), (err, "500"))),
]


@pytest.mark.parametrize(("transport", "staged", "route", "number", "act", "said"), LEFT_OUT)
def test_one_that_fails_is_left_out_by_name_and_all_others_get_the_version(
    start, tmp_path, transport, staged, route, number, act, said
):
    timeout_s = 1.0 if act is hang else TIMEOUT_S
    orchestrator = start(3, bool(staged), in_turn=staged == "in turn", timeout_s=timeout_s, b=on(route, number, act))
    began = time.monotonic()
    publisher(orchestrator, transport, tmp_path).publish(Model(5), 5)
    assert time.monotonic() - began < TIMEOUT_S
    assert [holds(client, 5, 5) for client in orchestrator.clients] == [True, False, True]
    assert set(orchestrator.reasons) == {"b"}
    assert said in orchestrator.reasons["b"]
    assert orchestrator.publishes.version == 5


@pytest.mark.parametrize("transport", ["file", "gloo"])
def test_one_that_hangs_holds_nobody_up_longer_than_the_pool_lets_it(start, tmp_path, transport):
    orchestrator = start(2, b=on(UPDATE, AFTER_TEST + 1, hang))
    orchestrator.loop.call_soon_threadsafe(orchestrator.loop.call_later, 1.0, orchestrator.leave_out, "b")
    assert publisher(orchestrator, transport, tmp_path).publish(Model(5), 5) < TIMEOUT_S
    assert [holds(client, 5, 5) for client in orchestrator.clients] == [True, False]
    assert orchestrator.reasons["b"] == "out"


@pytest.mark.parametrize(
    ("transport", "often", "excluded"),
    [("file", 1, True), ("gloo", 1, False), ("gloo", 10, True)],
)
def test_an_error_in_a_transfer_of_a_group_costs_an_instance_its_place_only_three_times_in_a_row(
    start, tmp_path, transport, often, excluded
):
    """Another one may be to blame. A success resets the count: it errs in each of three versions."""
    left = {}

    async def errs(route, body, count):
        if route == UPDATE and count >= AFTER_TEST and left.setdefault(body["update_info"]["version"], often):
            left[body["update_info"]["version"]] -= 1
            raise InstanceFault("answered 500")

    orchestrator = start(2, b=errs)
    sender = publisher(orchestrator, transport, tmp_path)
    for version in (1, 2, 3):
        sender.publish(Model(version), version)
    assert [holds(client, 3, 3) for client in orchestrator.clients] == [True, not excluded]
    assert set(orchestrator.reasons) == ({"b"} if excluded else set())


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("transport", ["file", "gloo"])
def test_a_bucket_that_everybody_gets_corrupted_fails_the_sync_by_its_tensors_names(start, tmp_path, transport, staged):
    orchestrator = start(2, staged, a=on(UPDATE, AFTER_TEST, corrupt), b=on(UPDATE, AFTER_TEST, corrupt))
    with pytest.raises(
        WeightSyncError,
        match=rf"{OUTPUT} … {OUTPUT} was corrupted in transit: its checksum is \w+, but the announced one is '0",
    ):
        publisher(orchestrator, transport, tmp_path).publish(Model(5), 5)
    assert orchestrator.publishes.version is None


def test_other_weights_than_the_trainers_fail_the_sync_by_name(start, tmp_path):
    class Other(Model):
        def probe(self, token_ids):
            return [value + 0.001 for value in super().probe(token_ids)]

    message = r"a: after the update to weight version 3 .* largest difference 0.001, limit 0.0001"
    with pytest.raises(WeightSyncError, match=message):
        publisher(start(1), "file", tmp_path).publish(Other(3), 3)


def test_an_instance_that_does_not_follow_its_output_layer_is_left_out(start, tmp_path):
    orchestrator = start(2)
    orchestrator.clients[1].stale_head = True
    publisher(orchestrator, "file", tmp_path).publish(Model(5), 5)
    assert "b: self-test failed" in orchestrator.reasons["b"]
    assert holds(orchestrator.clients[0], 5, 5)


def test_without_a_member_the_publish_fails_with_the_pools_reason(start, tmp_path):
    orchestrator = start(1, a=on(BEGIN, AFTER_TEST, die))
    sender = publisher(orchestrator, "gloo", tmp_path)
    sender.publish(Model(1), 1)  # no instance holds it
    assert (orchestrator.publishes.version, set(orchestrator.reasons)) == (1, {"a"})
    orchestrator.pool.give_up(ProcessDied("no rollout instance is left"))
    with pytest.raises(MetronomeError, match="no rollout instance is left"):
        sender.publish(Model(2), 2)


async def begin(client):
    """As an orchestrator that ends in the middle of a weight update."""
    await client.begin_weight_update({})


async def take_perturbed(client):
    """As an orchestrator that ends between a self-test and the first version."""
    await begin(client)
    await client.update_weights({"update_info": {"transport": "base", "perturb": [1]}})
    await client.finish_weight_update({"weight_version": 2**40, "probe": [1, 2]})


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize(
    ("before", "loads"),
    [(None, 1), (lambda client: client.pause({}), 1), (begin, 2), (take_perturbed, 2)],
)
def test_the_self_test_loads_the_base_again_only_if_the_instance_has_something_else(start, before, loads, stale):
    orchestrator = start(1)
    (one,) = orchestrator.pool.instances
    if before is not None:
        orchestrator.run(before(one.client))
    one.client.stale_head = stale
    if stale:
        with pytest.raises(WeightSyncError, match=r"a: self-test failed: .* moved by 0"):
            orchestrator.run(orchestrator.pool.check_instance(one))
    else:
        orchestrator.run(orchestrator.pool.check_instance(one))
    assert one.client.calls.count(UPDATE) == loads
    assert one.client.paused  # nobody is served by the perturbed weights


def made(vocabulary, count, text):
    return make_probe(vocabulary=vocabulary, count=count, max_context=64, dtype="float32", text=text)


def test_the_probes_last_token_differs_and_none_that_is_perturbed_is_an_input():
    for vocabulary, count in ((61, 32), (151936, 32), (8, 32)):
        for text in ([], [3, 1, 3, 3, 1], [3] * 99, list(range(8)) * 9):
            found = made(vocabulary, count, text)
            assert len(found.token_ids) == min(count, vocabulary // 2)
            assert found.token_ids[: len(text)][:-1] == tuple(text)[: len(found.token_ids)][:-1]
            assert found.perturb[0] == found.token_ids[-1]
            assert not set(found.perturb) & set(found.token_ids[:-1])
            assert max(found.perturb) < vocabulary
            assert found == made(vocabulary, count, iter(text))
        assert len(set(make_probe(vocabulary, count, 64, "float32").token_ids)) == min(count, vocabulary // 2)
    assert made(99, 4, [7, 7, 9, 7, 9, 5]).token_ids == (7, 7, 9, 5)  # 7 and 9 are inputs
    assert make_probe(100, 32, 10, "float32").request().prompt == list(make_probe(100, 9, 99, "float32").token_ids)
    assert make_probe(100, 0, 64, "float32") is None


def test_the_difference_that_counts_depends_on_the_dtype_and_nan_is_never_small():
    exact, coarse = (make_probe(61, 4, 64, dtype) for dtype in ("float32", "bfloat16"))
    assert exact.difference([0.0, 0.0], [0.5, 0.1]) == 0.5
    assert coarse.difference([0.0, 0.0], [0.5, 0.1]) == pytest.approx(0.3)
    assert not coarse.difference([0.0, 0.0], [float("nan"), 0.0]) <= 1.0


def test_staged_weights_are_swapped_in_by_one_instance_after_the_other(start, tmp_path):
    """While one swaps the others serve, those before it the new version, those behind it the old one."""
    seen = []

    async def look(route, body, count):
        if route == BEGIN and count >= AFTER_TEST:
            seen.append([(one.state, one.version) for one in orchestrator.pool.instances])

    orchestrator = start(3, True, in_turn=True, a=look, b=look, c=look)
    sender = publisher(orchestrator, "file", tmp_path)
    for version in (0, 1):
        sender.publish(Model(version), version)
        assert all(holds(client, version, version) for client in orchestrator.clients)
    updating = ("updating", 0)
    new = ("serving", 1)
    old = ("serving", 0)
    assert seen[3:] == [[updating, old, old], [new, updating, old], [new, new, updating]]


def test_one_that_was_left_out_before_its_turn_is_not_taken_back_by_it(start, tmp_path):
    async def exclude(route, body, count):
        if route == BEGIN and count == AFTER_TEST:
            orchestrator.leave_out("b")

    orchestrator = start(3, True, in_turn=True, a=exclude)
    publisher(orchestrator, "gloo", tmp_path).publish(Model(5), 5)
    assert [holds(client, 5, 5) for client in orchestrator.clients] == [True, False, True]
    assert [one.state for one in orchestrator.pool.instances] == ["serving", "out", "serving"]
    assert orchestrator.publishes.version == 5


STOPS = {
    "out": lambda one: one.exclude("it did not answer"),
    "draining": lambda one: one.drain(),
    "gone": lambda one: one.depart("its process ended"),
}


@pytest.mark.parametrize("end", STOPS)
@pytest.mark.parametrize("in_turn", [False, True])
def test_one_that_stopped_serving_while_it_received_staged_weights_is_not_taken_back_by_the_swap(
    start, tmp_path, in_turn, end
):
    async def leave(route, body, count):
        if route == UPDATE and orchestrator.publishes.version == 1 and body["update_info"].get("bucket") == 1:
            STOPS[end](orchestrator.pool.find_instance("b"))

    orchestrator = start(2, True, in_turn=in_turn, a=leave)
    sender = publisher(orchestrator, "file", tmp_path)
    for version in (1, 2):
        sender.publish(Model(version), version)
    assert [one.state for one in orchestrator.pool.instances] == ["serving", end]
    assert [holds(client, 2, 2) for client in orchestrator.clients] == [True, False]
    assert orchestrator.publishes.version == 2


def test_a_late_member_of_a_staged_sync_is_being_updated_while_the_others_serve(start, tmp_path):
    """Else the pool would bring it to the version before at the same time."""
    seen = []

    async def look(route, body, count):
        if route == UPDATE and len(orchestrator.clients[0].calls) and orchestrator.publishes.version == 1:
            seen.append([one.state for one in orchestrator.pool.instances])

    orchestrator = start(1, True, a=look)
    sender = publisher(orchestrator, "file", tmp_path)
    sender.publish(Model(1), 1)
    orchestrator.late()
    sender.publish(Model(2), 2)
    assert seen[0] == ["serving", "updating"]
    assert all(holds(client, 2, 2) for client in orchestrator.clients)


@pytest.mark.parametrize(("sizes", "ranks"), [((1, 1, 1), [1, 2, 3]), ((2, 1, 4), [1, 3, 4]), ((4, 4), [1, 5])])
def test_instances_of_several_processes_get_as_many_ranks_of_the_group(start, sizes, ranks):
    orchestrator = start(len(sizes))
    given = {}

    def members_of(client):
        async def join(body):
            info = body["init_info"]
            given[client.name] = (info["rank"], info["world_size"])

        return join

    for client, size in zip(orchestrator.clients, sizes, strict=True):
        client.world_size = size
        client.init_weight_transfer_engine = members_of(client)
    opened = orchestrator.ask(OpenSync(version=1))
    assert (opened.connect, opened.world_size) == (True, 1 + sum(sizes))
    orchestrator.ask(ConnectSync(version=1, transport="gloo", stages=(MeetingPlace("127.0.0.1", 1),)))
    assert [given[name] for name in opened.members] == [(rank, 1 + sum(sizes)) for rank in ranks]
