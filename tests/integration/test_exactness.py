"""On real processes: asynchrony changes no number."""

from collections import Counter

import pytest

from engine.errors import BadInput
from engine.instance.embedded.rollout_model import bfloat16_available
from engine.orchestrator.launch import launch_run
from engine.run.trace import read_spans
from engine.tools.timeline import overlapped_steps
from support.runs import ROOT, config_of, wait_for
from support.whole_runs import orchestrating, run, same, steps, weights


@pytest.fixture
def exact(settings):
    # several a step, so that a periodic step trains before its last arrival
    small_windows = {"train.micro_batch_tokens": 150}
    some_excluded = {"reward.function": f"{ROOT}/tests/support/rewards.py:even_or_not_known"}
    return (
        settings
        | small_windows
        | some_excluded
        | {"rollout.deterministic": True, "train.consume": "prompt_order", "rollout.concurrency": 1}
    )


def assert_traced(spans, report, responses):
    """The sizes in the spans are those of steps.jsonl, and every response is there once."""
    for line in report:
        mine = [span for span in spans if span.get("step") == line["step"]]
        sampled = [span for span in mine if span["name"] == "rollout"]
        numbers = Counter((span["group"], span["number"]) for span in sampled)
        assert set(numbers.values()) == {1}
        assert {number for _, number in numbers} == set(range(responses))
        assert {span["version"] for span in sampled} == {line["weight_version"]}
        assert sum(span["prompt_tokens"] + span["tokens"] for span in sampled) == line["trained_tokens"]
        trained = [span for span in mine if span["name"] == "train"]
        assert sum(span["tokens"] for span in trained) == line["trained_tokens"]
        assert sum(span["computed_tokens"] for span in trained) == line["computed_tokens"]
        assert min(span["micro_batches"] for span in trained) >= 1
        (sent,) = {span["bytes"] for span in mine if span["name"] == "sync" and "bytes" in span}
        assert sent > 0


@pytest.mark.slow
def test_sync_periodic_and_resumed_runs_are_bit_identical(exact, tmp_path):
    for mode, prefetch in (("sync", "off"), ("periodic", "on")):
        how = {"run.name": mode, "train.mode": mode, "train.prefetch": prefetch, "train.steps": 4}
        run(exact | how, tmp_path)
    assert same(weights(tmp_path, "sync"), weights(tmp_path, "periodic"))
    spans = read_spans(tmp_path / "periodic/trace")
    windows = Counter(span["step"] for span in spans if span["name"] == "train")
    assert min(windows.values()) >= 2
    assert any(overlapped_steps(spans).values())
    assert not any(overlapped_steps(read_spans(tmp_path / "sync/trace")).values())
    report = steps(tmp_path, "periodic")
    assert_traced(spans, report, responses=4)
    assert [line["versions_seen"] for line in report] == [[0], [1], [2], [3]]
    assert max(line["max_ratio_gap"] for line in report) <= 1e-3
    assert max(line["mismatch_kl"] for line in report) <= 1e-6
    assert min(line["trained_tokens"] for line in report) > 0
    assert sum(line["reward_excluded"] for line in report) > 0
    assert len({line["grad_norm"] for line in report}) == 4  # it did train
    assert max(line["old_ratio_max"] for line in report[1:]) > 1.0  # "previous": the ratio is no importance ratio

    killed = exact | {"run.name": "killed", "train.steps": 4, "checkpoint.every": 2}
    with orchestrating(killed, tmp_path):
        wait_for(lambda: len(steps(tmp_path, "killed")) >= 3, "the third step")
    if (tmp_path / "killed/policy").exists():
        pytest.fail("the run ended before it was killed")
    run(killed, tmp_path, "--resume")
    assert same(weights(tmp_path, "killed"), weights(tmp_path, "sync"))
    assert [line["step"] for line in steps(tmp_path, "killed")] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_recorded_arrival_order_run_replays_bit_identically(settings, tmp_path):
    run(settings | {"run.name": "live", "train.record": True, "rollout.concurrency": 2}, tmp_path)
    record = tmp_path / "live/record.msgpack"
    run(settings | {"run.name": "replayed"}, tmp_path, "--replay", str(record))
    assert same(weights(tmp_path, "live"), weights(tmp_path, "replayed"))
    keys = ("loss", "grad_norm", "kl", "reward_mean", "trained_tokens")
    for a, b in zip(steps(tmp_path, "live"), steps(tmp_path, "replayed"), strict=True):
        assert {key: a[key] for key in keys} == {key: b[key] for key in keys}

    incomplete = "groups of step 2, train.prompts_per_step is 6"
    for damaged, said in ((b"\xc1" + b"no record", "not a record"), (record.read_bytes()[:-10], incomplete)):
        record.write_bytes(damaged)
        with pytest.raises(BadInput, match=said):
            launch_run(config_of(settings | {"run.name": "broken"}), replay=record)


@pytest.mark.slow
@pytest.mark.skipif(not bfloat16_available(), reason="this processor has no bf16 products")
def test_rollouts_in_bf16_repeat_bit_for_bit_within_the_limits_of_bf16(exact, tmp_path):
    coarse = exact | {"model.dtype": "bfloat16", "train.ratio_gap_limit": 0.2, "train.steps": 2}
    for mode in ("sync", "periodic"):
        run(coarse | {"run.name": mode, "train.mode": mode}, tmp_path)
        for line in steps(tmp_path, mode):
            assert 1e-5 < line["max_ratio_gap"] <= 0.2  # in fp32 it is less
            assert 0 < line["sync_difference"] <= 0.02
    assert same(weights(tmp_path, "sync"), weights(tmp_path, "periodic"))
