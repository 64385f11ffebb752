"""Staleness on purpose: whole runs in the modes that keep batches in flight, with and without staged weights."""

import pytest

from support.whole_runs import run, same, steps, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
STEPS = 6
STALE = {
    "train.steps": STEPS,
    "algorithm.old_policy": "rollout",
    "algorithm.kl_coef": 0,
    "rollout.concurrency": 2,
    "train.micro_batch_tokens": 150,
}


@pytest.mark.nightly
@pytest.mark.parametrize(("mode", "lag"), [("one_step_off", 1), ("bounded", 2)])
def test_an_exact_lag_is_kept_and_is_a_function_of_the_seed(settings, tmp_path, mode, lag):
    """Every response of batch t comes from version max(0, t - lag), however weights move; so runs are bit-identical."""
    exact = {"train.mode": mode, "rollout.deterministic": True, "train.consume": "prompt_order"}
    exact |= {"train.max_staleness": lag, "train.exact_lag": True} if mode == "bounded" else {}
    for name, staged in (("stopped", False), ("staged", True)):
        run(settings | STALE | exact | {"run.name": name, "weights.staged": staged}, tmp_path)
        lines = steps(tmp_path, name)
        assert [line["versions_seen"] for line in lines] == [[max(0, step - lag)] for step in range(STEPS)]
        assert [line["staleness_mean"] for line in lines] == [min(step, lag) for step in range(STEPS)]
    assert same(weights(tmp_path, "stopped"), weights(tmp_path, "staged"))


@pytest.mark.parametrize("transport", ["file", pytest.param("gloo", marks=pytest.mark.nightly)])
def test_bounded_staleness_with_two_instances(settings, tmp_path, transport):
    bounded = {
        "train.mode": "bounded",
        "train.max_staleness": 2,
        "rollout.instances": 2,
        "weights.staged": True,
        "weights.transport": transport,
    }
    run(settings | STALE | bounded, tmp_path)
    lines = steps(tmp_path, "run")
    assert [line["step"] for line in lines] == list(range(STEPS))
    for line in lines:
        assert set(line["versions_seen"]) <= set(range(max(0, line["step"] - 2), line["step"] + 1))
        assert 0 <= line["staleness_mean"] <= 2
        assert line["pool_size"] == 2
    assert max(line["staleness_mean"] for line in lines) > 0
    assert max(line["old_ratio_max"] for line in lines) > 1.0


def test_a_resumed_run_generates_anew_what_was_in_flight(settings, tmp_path):
    stale = settings | STALE | {"train.mode": "one_step_off", "checkpoint.every": 2}
    run(stale | {"train.steps": 4}, tmp_path)
    run(stale, tmp_path, "--resume")
    lines = steps(tmp_path, "run")
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert [line["versions_seen"] for line in lines] == [[0], [0], [1], [2], [4], [4]]


@pytest.mark.nightly
def test_a_recorded_stale_run_replays_bit_identically(settings, tmp_path):
    stale = settings | STALE | {"train.mode": "bounded", "train.max_staleness": 2}
    run(stale | {"run.name": "live", "train.record": True}, tmp_path)
    run(stale | {"run.name": "replayed"}, tmp_path, "--replay", str(tmp_path / "live/record.msgpack"))
    live, replayed = (steps(tmp_path, name) for name in ("live", "replayed"))
    assert same(weights(tmp_path, "live"), weights(tmp_path, "replayed"))
    assert [line["versions_seen"] for line in live] == [line["versions_seen"] for line in replayed]
