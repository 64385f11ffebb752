"""Whole runs in parallel layouts: the orchestrator, an instance over HTTP, ranks under torch elastic."""

import random
from collections import Counter
from dataclasses import replace

import msgpack
import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file

from engine.errors import RatioGapError
from engine.orchestrator.launch import launch_run as launch_here
from engine.run.checkpoint_files import is_complete, latest_checkpoint, step_of
from engine.run.trace import read_spans
from engine.tools.timeline import overlapped_steps
from engine.types import Group, Prompt, Score
from engine.wire.columns import Row, open_group, pack_group
from engine.wire.messages import Window
from engine.wire.record import RecordWriter
from support.faulty_weights import corrupt
from support.policies import response
from support.runs import ROOT, config_of, launch
from support.tiny_models import reference, reference_logprobs, save
from support.whole_runs import kill_a_rank, refused, run, same, spans, steps, weights

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(600)]
REWARDS = ROOT / "tests/support/rewards.py"


@pytest.fixture
def exact(settings):
    """A function of its seed; windows of two groups, so that a periodic step trains before its last arrival."""
    return settings | {
        "rollout.deterministic": True,
        "train.consume": "prompt_order",
        "rollout.concurrency": 1,
        "train.micro_batch_tokens": 150,
        "train.steps": 2,
    }


def check_report(lines, count, ranks):
    """On-policy is checked, and the figures are those of all ranks."""
    assert [line["step"] for line in lines] == list(range(count))
    assert [line["versions_seen"] for line in lines] == [[step] for step in range(count)]
    assert max(line["max_ratio_gap"] for line in lines) <= 1e-3
    assert max(line["mismatch_kl"] for line in lines) <= 1e-6
    for line in lines:
        assert len(line["memory_peak_gib"]) == ranks
        assert min(line["memory_peak_gib"]) > 0.05
        assert line["pool_size"] == 1
        assert 0 < line["computed_tokens"] <= line["trained_tokens"]
        assert 0 < line["wait_first_s"] <= line["wait_s"] < line["step_s"]
        assert line["grad_norm"] > 0


def in_small_buckets(deep_model):
    """Over the network, in several buckets for each rank or stage."""
    assert sum(tensor.nbytes for tensor in load_file(f"{deep_model}/model.safetensors").values()) > 6 * 2**20
    return {"weights.transport": "gloo", "weights.bucket_mb": 1, "model.path": str(deep_model)}


@pytest.mark.nightly
def test_tensor_parallel_runs_are_exact_and_resume_as_replicas(exact, deep_model, tmp_path):
    exact = exact | {"parallel.tensor": 2} | in_small_buckets(deep_model)
    for mode in ("sync", "periodic"):
        run(exact | {"run.name": mode, "train.mode": mode}, tmp_path)
        check_report(steps(tmp_path, mode), 2, 2)
    assert same(weights(tmp_path, "sync"), weights(tmp_path, "periodic"))
    windows = Counter(span["step"] for span in spans(tmp_path, "periodic", "train", 0))
    assert min(windows.values()) >= 2
    assert [span["groups"] for span in spans(tmp_path, "periodic", "train", 0)] == [
        span["groups"] for span in spans(tmp_path, "periodic", "train", 1)
    ]
    assert any(overlapped_steps(read_spans(tmp_path / "periodic/trace")).values())

    replicas = {"run.name": "periodic", "parallel.tensor": 1, "parallel.data": 2, "train.steps": 4}
    run(exact | replicas, tmp_path, "--resume")
    check_report(steps(tmp_path, "periodic"), 4, 2)
    assert "was saved in the layout" in (tmp_path / "periodic/logs/trainer.log").read_text()
    assert not same(weights(tmp_path, "sync"), weights(tmp_path, "periodic"))  # it went on


def test_replicas_are_exact_also_when_one_dies_and_the_run_resumes(exact, tmp_path):
    exact = exact | {"parallel.data": 2, "train.steps": 5, "reward.function": f"{REWARDS}:after_100_ms"}
    run(exact | {"run.name": "sync", "train.mode": "sync"}, tmp_path)
    check_report(steps(tmp_path, "sync"), 5, 2)
    assert {rank: len(spans(tmp_path, "sync", "train", rank)) >= 5 for rank in (0, 1)} == {0: True, 1: True}

    periodic = exact | {"run.name": "periodic", "checkpoint.every": 2}
    kill_a_rank(periodic, tmp_path)
    run(periodic, tmp_path, "--resume")
    check_report(steps(tmp_path, "periodic"), 5, 2)
    assert same(weights(tmp_path, "sync"), weights(tmp_path, "periodic"))


@pytest.mark.nightly
def test_pipeline_and_context_parallel_runs(exact, deep_model, tmp_path):
    exact = exact | in_small_buckets(deep_model)
    single = exact | {"train.micro_batch_tokens": 80}  # one group each
    base = {key: value.shape for key, value in load_file(f"{exact['model.path']}/model.safetensors").items()}
    for layout in ("pipeline", "context"):
        arrival = {"run.name": layout, f"parallel.{layout}": 2, "train.consume": "arrival", "rollout.concurrency": 4}
        run(single | arrival, tmp_path)
        check_report(steps(tmp_path, layout), 2, 2)
        plans = [[span["groups"] for span in spans(tmp_path, layout, "train", rank)] for rank in (0, 1)]
        assert plans[0] == plans[1]  # both ranks have had every window
        assert sorted(sum(plans[0], [])) == sorted([*range(6), *range(6)])
        assert {key: value.shape for key, value in weights(tmp_path, layout).items()} == base
        most = max(map(len, plans[0]))
        assert most > 1  # several micro-batches in a pipeline; elsewhere waiting windows are given as one
    bubbles = [span for span in read_spans(tmp_path / "pipeline/trace") if span["name"] == "bubble"]
    assert {span["lane"] for span in bubbles} == {"trainer-0 bubble", "trainer-1 bubble"}
    trained = {span["end"]: span for rank in (0, 1) for span in spans(tmp_path, "pipeline", "train", rank)}
    assert len(bubbles) == len(trained)
    assert all(trained[span["end"]]["start"] <= span["start"] < span["end"] for span in bubbles)
    assert not [span for span in read_spans(tmp_path / "context/trace") if span["name"] == "bubble"]

    (one, *_), (other, *_) = (steps(tmp_path, layout) for layout in ("pipeline", "context"))
    for key in (
        "reward_mean",
        "trained_tokens",
        "response_length_mean",
    ):  # the same rollouts, since the weights are the same
        assert one[key] == other[key], key
    for key in ("grad_norm", "entropy"):
        assert one[key] == pytest.approx(other[key], rel=1e-4), key


def entries(path):
    with path.open("rb") as file:
        return list(msgpack.Unpacker(file))


@pytest.mark.nightly
def test_a_recorded_run_of_replicas_replays_exactly(settings, tmp_path):
    recorded = settings | {"parallel.data": 2, "train.steps": 2, "train.record": True}
    run(recorded | {"run.name": "live"}, tmp_path)
    live = steps(tmp_path, "live")
    check_report(live, 2, 2)
    record = tmp_path / "live/record.msgpack"
    header, *given = entries(record)

    run(recorded | {"run.name": "again", "train.record": False}, tmp_path, "--replay", str(record))
    assert same(weights(tmp_path, "live"), weights(tmp_path, "again"))
    exactly = ("loss", "grad_norm", "kl", "old_ratio_max", "max_ratio_gap", "reward_mean", "trained_tokens")
    again = steps(tmp_path, "again")
    assert [[line[key] for key in exactly] for line in live] == [[line[key] for key in exactly] for line in again]

    wrong = tmp_path / "wrong.msgpack"  # an error of one replica ends the replay of all
    wrong.write_bytes(
        b"".join(msgpack.packb(entry) for entry in [header, *with_a_wrong_logprob(given, replica_group=1)])
    )
    code, output = launch(recorded | {"run.name": "wrong"}, tmp_path, "--replay", str(wrong))
    assert code == 1
    assert "RatioGapError: step" in output

    changed = {"train.learning_rate": 0.5, "parallel.data": 1}
    for key, value in changed.items():
        said = refused(recorded | {"run.name": "other", key: value}, tmp_path, "--replay", str(record))
        assert f"{key} is {value}, but the record was taken with {recorded[key]}" in said
    assert not (tmp_path / "other").exists()


def with_a_wrong_logprob(given, replica_group):
    window = next(entry for entry in given if entry["replica_group"] == replica_group)
    row = window["rows"][0]
    group = open_group(msgspec.convert(row, Row))
    first, *others = group.responses
    wrong = replace(first, logprobs=(-0.5, *first.logprobs[1:]))
    row |= msgspec.to_builtins(pack_group(replace(group, responses=(wrong, *others))), builtin_types=(bytes,))
    return given


def test_replicas_that_share_experts_replay_in_lockstep(settings, tmp_path):
    """Written by hand with transformers' log-probabilities, since the embedded engine samples from no such model."""
    model = save(tmp_path / "mixture", "qwen3_moe")
    mixture = settings | {
        "model.path": model,
        "rollout.engine": "vllm",
        "train.steps": 2,
        "train.prompts_per_step": 3,
        "train.micro_batch_tokens": 50,
        "train.ratio_gap_limit": 0,
        "algorithm.routing_replay": True,
    }
    layouts = {"one": {}, "lockstep": {"parallel.data": 2, "parallel.expert": 2}}
    for name, layout in layouts.items():
        record = tmp_path / f"{name}.msgpack"
        write_record(record, config_of(mixture | layout), model)
        run(mixture | layout | {"run.name": name}, tmp_path, "--replay", str(record))
    for number in (0, 1):
        windows = [span["groups"] for span in spans(tmp_path, "lockstep", "train", number)]
        assert windows == [[0, 1], [2], [1], [2, 0]], f"rank {number}"
    for mine, theirs in zip(steps(tmp_path, "lockstep"), steps(tmp_path, "one"), strict=True):
        for key in ("loss", "grad_norm", "kl", "entropy"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6), key
        assert mine["trained_tokens"] == theirs["trained_tokens"]
        assert 1 < mine["expert_load_max"] == pytest.approx(theirs["expert_load_max"], rel=0.1)
    assert steps(tmp_path, "lockstep")[0]["max_ratio_gap"] <= 1e-3 < steps(tmp_path, "lockstep")[1]["max_ratio_gap"]
    ours = weights(tmp_path, "lockstep")
    theirs = weights(tmp_path, "one")
    base = load_file(f"{model}/model.safetensors")
    assert ours.keys() == base.keys()
    moved, apart = (
        sum(float((side[key] - theirs[key]).square().sum()) for key in base) ** 0.5 for side in (base, ours)
    )
    assert moved > 0.05
    assert apart < 0.01 * moved


def write_record(path, config, model):
    """Two steps of the same three groups, in windows of one and two, all taken by the only replica group. The second
    has routes that no router would choose."""
    recorder = RecordWriter(path, config, 0)
    draw = random.Random(0)
    judge = reference(model)

    def ids(length):
        return [draw.randrange(2, 61) for _ in range(length)]

    def group(step, index):
        prompt = ids(9)
        answers = [ids(length) for length in (7, 3, 12, 5)]
        logprobs = [reference_logprobs(judge, prompt, answer).tolist() for answer in answers]
        responses = [replace(one, versions=((0, step),)) for one in map(response, answers, logprobs)]
        scores = tuple(Score(draw.random()) for _ in responses)
        return Group(
            step=step,
            index=index,
            prompt=Prompt(f"p{index}", "", "", tuple(prompt)),
            responses=tuple(responses),
            scores=scores,
            columns={"routes": np.tile(np.array([[3, 0]], np.uint8), (36, 2, 1))} if step else {},
        )

    for step, window in ((0, (0, 1)), (0, (2,)), (1, (1,)), (1, (2, 0))):
        recorder.add_window(0, Window(step, tuple(pack_group(group(step, index)) for index in window)))
    recorder.flush()


@pytest.mark.nightly
def test_a_replica_that_gets_nothing_and_groups_that_come_slowly(settings, tmp_path):
    slow = {
        "reward.function": f"{REWARDS}:after_3_s",
        "train.prompts_per_step": 1,
        "parallel.data": 2,
        "train.steps": 2,
    }
    run(settings | slow, tmp_path)
    lines = steps(tmp_path, "run")
    check_report(lines, 2, 2)
    for step, line in enumerate(lines):
        assert line["wait_first_s"] > 3.0
        windows = [span for rank in (0, 1) for span in spans(tmp_path, "run", "train", rank) if span["step"] == step]
        assert [span["groups"] for span in windows] == [[0]]


def test_an_error_of_one_replica_ends_all_after_a_checkpoint(settings, tmp_path, monkeypatch):
    corrupt(monkeypatch, version=1, in_transit=False)
    config = config_of(settings | {"parallel.data": 2, "weights.check_tokens": 0})
    with pytest.raises(RatioGapError, match=r"step 1.*disagree.*train\.ratio_gap_limit"):
        launch_here(config)
    checkpoint = latest_checkpoint(config.folder / "checkpoints")
    assert is_complete(checkpoint)
    assert step_of(checkpoint) == 1


@pytest.mark.nightly
def test_groups_that_come_longer_apart_than_anybody_may_be_silent(settings, tmp_path):
    slow = {"reward.function": f"{REWARDS}:after_30_s", "reward.timeout_s": 60, "train.timeout_s": 20}
    run(settings | slow | {"train.prompts_per_step": 2, "parallel.data": 2, "train.steps": 1}, tmp_path)
    (line,) = steps(tmp_path, "run")
    assert line["wait_s"] > 40  # 60 s for one replica, 30 s or more for the other
