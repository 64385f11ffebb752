"""New weights serve at once, but what they sampled counts only once the instance has computed what the trainer does."""

import contextlib

import pytest

from engine.errors import MetronomeError, WeightSyncError
from engine.orchestrator.publish.probe import LEAST, MOST, make_probe
from support.weights_double import Model, base_folder, publisher, starting

FINISH = "/finish_weight_update"


@pytest.fixture
def start(tmp_path):
    yield from starting(base_folder(tmp_path / "base"))


def deaf(number):
    """From the so manieth of its updates on (the self-test's comes first) other log-probabilities."""

    async def fault(route, body, count):
        if route != FINISH or count < number:
            return None
        return body | {"shift": 0.001}

    return fault


@pytest.mark.parametrize(("staged", "in_turn"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("transport", ["file", "gloo"])
def test_one_that_computes_otherwise_is_never_trusted_and_is_left_out_by_name(
    start, tmp_path, transport, staged, in_turn
):
    orchestrator = start(2, staged, in_turn=in_turn, b=deaf(2))
    publisher(orchestrator, transport, tmp_path).publish(Model(5), 5)
    assert [client.trusted for client in orchestrator.clients] == [True, False]
    assert "b: after the update to weight version 5" in orchestrator.reasons["b"]
    assert "largest difference 0.001, limit 0.0001" in orchestrator.reasons["b"]
    assert [one.state for one in orchestrator.pool.instances] == ["serving", "out"]


class Apart(Model):
    """A trainer whose log-probabilities are so far from the instance's."""

    def __init__(self, seed, *shifts):
        super().__init__(seed)
        self.shifts = shifts

    def probe(self, token_ids):
        return [value + shift for value, shift in zip(super().probe(token_ids), self.shifts, strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-3, 0.004])
def test_later_versions_may_be_apart_by_three_times_what_version_0_is(start, tmp_path, dtype, noise):
    """Whatever the model's and the engines' rounding is, down to a least limit."""
    fixed = make_probe(64, 6, 64, dtype)
    orchestrator = start(1, fixed=fixed)
    sender = publisher(orchestrator, "file", tmp_path)
    sender.publish(Apart(0, *[noise] * 5), 0)  # the weights from which the instances were started
    assert orchestrator.publishes.difference == pytest.approx(noise, abs=1e-6)
    allowed = min(max(3 * noise, LEAST[dtype]), MOST[dtype])
    sender.publish(Apart(4, *[-0.98 * allowed] * 5), 1)
    assert orchestrator.publishes.difference == pytest.approx(0.98 * allowed, abs=1e-6)
    assert orchestrator.clients[0].trusted
    with pytest.raises(WeightSyncError, match=r"a: after the update to weight version 2 .* was measured"):
        sender.publish(Apart(5, *[1.02 * allowed] * 5), 2)
    assert not orchestrator.clients[0].trusted


ROUNDING = [
    ("bfloat16", 0.0, 3, (0.29,) * 5, ""),
    ("bfloat16", 0.0, 3, (0.0, 0.0, 1.45, 0.0, 0.0), ""),
    ("bfloat16", 0.0, 3, (0.31,) * 5, "mean difference 0.31, limit 0.3"),
    ("float32", 0.0, 0, (0.002,) * 5, "largest difference 0.002, limit 0.0001;"),
    ("float32", 0.002, 3, (0.002,) * 5, ""),
    ("float32", 0.002, 3, (0.0065,) * 5, "largest difference 0.0065, limit 0.006"),
]
"""dtype, what was recorded before a resume, the trainer's weights, how far apart they compute, and what is said."""


@pytest.mark.parametrize(("dtype", "recorded", "seed", "shifts", "said"), ROUNDING)
def test_without_weights_that_both_hold_the_limit_is_what_was_recorded_or_what_rounding_never_makes(
    start, tmp_path, dtype, recorded, seed, shifts, said
):
    """A resumed run begins with a later version; so may a program's. Such a version may be close to the first weights,
    and the difference is then no rounding."""
    orchestrator = start(1, fixed=make_probe(64, 6, 64, dtype, recorded=recorded))
    with pytest.raises(WeightSyncError, match=said) if said else contextlib.nullcontext():
        publisher(orchestrator, "file", tmp_path).publish(Apart(seed, *shifts), 3)
    assert orchestrator.clients[0].trusted == (not said)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_version_0_that_arrives_changed_is_seen_although_nothing_was_measured_before(start, tmp_path, dtype):
    """The trainer agrees with what the instance computed before the sync, not with what it computes after it."""
    orchestrator = start(1, fixed=make_probe(64, 6, 64, dtype))
    sender = publisher(orchestrator, "file", tmp_path)

    class Changed(Model):
        def probe(self, token_ids):
            return Model(0).probe(token_ids)

    with pytest.raises(WeightSyncError, match="a: after the update to weight version 0"):
        sender.publish(Changed(1), 0)


@pytest.mark.parametrize("staged", [False, True])
def test_it_serves_before_it_is_compared_and_is_trusted_afterwards(start, tmp_path, staged):
    seen = []

    async def look(route, body, count):
        if route == FINISH and count > 1:
            seen.append(orchestrator.clients[0].trusted)

    orchestrator = start(1, staged, a=look)
    sender = publisher(orchestrator, "file", tmp_path)
    super(type(sender), sender).publish(Model(5), 5)
    assert orchestrator.pool.instances[0].state == "serving"
    assert not orchestrator.clients[0].trusted
    sender.verify(Model(5), 5)
    assert orchestrator.clients[0].trusted
    assert seen == [False]
    super(type(sender), sender).publish(Model(6), 6)
    with pytest.raises(MetronomeError, match="weight version 6 was never compared with the trainer's"):
        super(type(sender), sender).publish(Model(7), 7)


def test_one_that_is_left_out_while_it_is_compared_is_not_trusted_although_it_computes_as_the_trainer(start, tmp_path):
    orchestrator = start(2)
    sender = publisher(orchestrator, "file", tmp_path)
    super(type(sender), sender).publish(Model(5), 5)
    left_out = orchestrator.pool.find_instance("b")

    orchestrator.leave_out("b")
    sender.verify(Model(5), 5)
    assert [client.trusted for client in orchestrator.clients] == [True, False]
    left_out.wait_for_weights()
    sender.publish(Model(5), 5, again=True)
    assert [client.trusted for client in orchestrator.clients] == [True, True]
