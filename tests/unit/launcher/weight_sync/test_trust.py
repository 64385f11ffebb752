"""New weights serve at once, but what they sampled counts only once the instance has computed what the trainer does."""

import asyncio
import time

import pytest

from engine.errors import MetronomeError, WeightSyncError
from engine.launcher.pool.instance_client import InstanceGone
from engine.launcher.weight_sync.probe import probe
from support.weights_double import PROBE, Model, base_folder, publisher, starting

COMPLETIONS = "/v1/completions"


@pytest.fixture
def start(tmp_path):
    yield from starting(base_folder(tmp_path / "base"))


def deaf(number):
    """From the so manieth of its completions on (the self-test's two come first) other log-probabilities."""

    async def fault(route, body, count):
        if route != COMPLETIONS or count < number:
            return None
        return body | {"shift": 0.001}

    return fault


@pytest.mark.parametrize(("staged", "in_turn"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("transport", ["file", "gloo"])
def test_one_that_computes_otherwise_is_never_trusted_and_is_left_out_by_name(
    start, tmp_path, transport, staged, in_turn
):
    launcher = start(2, staged, in_turn=in_turn, b=deaf(3))
    publisher(launcher, transport, tmp_path).publish(Model(5), 5)
    assert [client.trusted for client in launcher.clients] == [True, False]
    assert "b: after the update to weight version 5" in launcher.pool.reasons["b"]
    assert "largest difference 0.001, limit 0.0001" in launcher.pool.reasons["b"]
    assert [one.state for one in launcher.pool.instances] == ["serving", "silent"]


class Apart(Model):
    """A trainer whose log-probabilities are so far from the instance's."""

    def __init__(self, seed, *shifts):
        super().__init__(seed)
        self.shifts = shifts

    def probe(self, token_ids):
        return [value + shift for value, shift in zip(super().probe(token_ids), self.shifts, strict=True)]


COARSE = probe(64, 6, 64, "bfloat16")


@pytest.mark.parametrize("shifts", [(0.019,) * 5, (-0.019, 0.019) * 2 + (0.019,), (0.0, 0.0, 0.095, 0.0, 0.0)])
def test_bf16_may_be_apart_by_a_mean_of_0_02(start, tmp_path, shifts):
    launcher = start(1, fixed=COARSE)
    publisher(launcher, "file", tmp_path).publish(Apart(3, *shifts), 3)
    assert launcher.sync.version == 3
    assert launcher.clients[0].trusted


@pytest.mark.parametrize("shifts", [(0.021,) * 5, (-0.021, 0.021) * 2 + (0.021,), (0.0, 0.0, 0.105, 0.0, 0.0)])
def test_bf16_that_is_further_apart_fails_the_sync_by_name(start, tmp_path, shifts):
    launcher = start(1, fixed=COARSE)
    message = r"a: after the update to weight version 3 .* mean difference 0.021, limit 0.02"
    with pytest.raises(WeightSyncError, match=message):
        publisher(launcher, "file", tmp_path).publish(Apart(3, *shifts), 3)
    assert not launcher.clients[0].trusted


@pytest.mark.parametrize("staged", [False, True])
def test_it_serves_before_it_is_compared_and_is_trusted_afterwards(start, tmp_path, staged):
    seen = []

    async def look(route, body, count):
        if route in ("/resume", COMPLETIONS) and count > 2:
            seen.append((route, launcher.clients[0].trusted))

    launcher = start(1, staged, a=look)
    sender = publisher(launcher, "file", tmp_path)
    super(type(sender), sender).publish(Model(5), 5)
    assert launcher.pool.instances[0].state == "serving"
    assert not launcher.clients[0].trusted
    with pytest.raises(MetronomeError, match="weight version 5 was not compared with the trainer's before version 6"):
        super(type(sender), sender).publish(Model(6), 6)
    sender.verify(Model(5), 5)
    assert launcher.clients[0].trusted
    assert seen == [("/resume", False), (COMPLETIONS, False)]


def test_an_instance_that_dies_before_it_is_compared_is_left_out(start, tmp_path):
    async def die(route, body, count):
        if route == COMPLETIONS and count == 3:
            raise InstanceGone("its connection broke")

    launcher = start(2, b=die)
    publisher(launcher, "file", tmp_path).publish(Model(5), 5)
    assert set(launcher.pool.reasons) == {"b"}
    assert [client.trusted for client in launcher.clients] == [True, False]


def test_one_that_is_left_out_while_it_is_compared_is_not_trusted_although_it_computes_as_the_trainer(start, tmp_path):
    launcher = start(2)
    sender = publisher(launcher, "file", tmp_path)
    super(type(sender), sender).publish(Model(5), 5)
    left_out = launcher.pool.named("b")
    asked_s = time.monotonic() + 5
    while launcher.clients[1].counts[COMPLETIONS] < 3 and time.monotonic() < asked_s:
        time.sleep(0.01)

    async def tell():
        launcher.pool.exclude(left_out, "silent")
        launcher.sync.expect(Model(5).probe(list(PROBE.token_ids)))
        await asyncio.wait(launcher.sync._checks.values())

    launcher.run(tell())
    assert [client.trusted for client in launcher.clients] == [True, False]
    launcher.run(launcher.sync.checked())
    launcher.clients[1].gone.clear()
    launcher.run(launcher.sync.catch_up(left_out))
    assert [(client.trusted, client.anew) for client in launcher.clients] == [(True, False), (True, True)]


def test_a_late_instance_is_not_trusted_before_it_is_compared(start, tmp_path):
    seen = []

    async def look(route, body, count):
        if route == COMPLETIONS:
            seen.append(launcher.clients[1].trusted)

    launcher = start(2, b=look)
    late = launcher.pool.named("b")
    launcher.pool.late.add(late)
    publisher(launcher, "file", tmp_path).publish(Model(5), 5)
    launcher.run(launcher.sync.catch_up(late))
    assert seen == [False] * 3  # in the self-test too
    assert launcher.clients[1].trusted


def test_a_late_instance_is_compared_with_the_version_it_gets(start, tmp_path):
    launcher = start(2, b=deaf(3))
    late = launcher.pool.named("b")
    launcher.pool.late.add(late)
    publisher(launcher, "file", tmp_path).publish(Model(5), 5)
    with pytest.raises(WeightSyncError, match="b: after the update to weight version 5 .* differ from the trainer's"):
        launcher.run(launcher.sync.catch_up(late))
    assert late.version is None
