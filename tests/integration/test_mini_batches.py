"""Several updates per batch (`train.updates`) on real processes: the same weights whatever the timing."""

import subprocess
import sys

import pytest

from support.commands import sets
from support.recipe_data import RECIPES, SHIPPED, small
from support.runs import ROOT, overrides
from support.whole_runs import kill_a_rank, run, same, spans, steps, weights

REWARDS = ROOT / "tests/support/rewards.py"


@pytest.fixture
def three_updates(settings):
    """A step of three mini-batches of two groups each. Trainer and instances use the temperature in different ways: it
    is that of responses, and not that of the probe of a weight sync."""
    return settings | {
        "rollout.temperature": 0.7,
        "train.updates": 3,
        "train.steps": 4,
        "algorithm.old_policy": "behavior",
        "rollout.deterministic": True,
        "train.consume": "prompt_order",
        "rollout.concurrency": 1,
    }


def check_report(lines, count):
    """Data are of the step's own weights, the instances are compared under these, and every update moved."""
    assert [line["step"] for line in lines] == list(range(count))
    assert [line["weight_version"] for line in lines] == list(range(count))
    assert [line["versions_seen"] for line in lines] == [[step] for step in range(count)]
    assert max(line["max_ratio_gap"] for line in lines) <= 1e-3
    assert max(line["mismatch_kl"] for line in lines) <= 1e-6
    assert min(line["old_ratio_max"] for line in lines) > 1.0 + 1e-4
    assert min(line["grad_norm"] for line in lines) > 0


@pytest.mark.slow
def test_sync_and_periodic_make_the_same_updates_and_the_first_begins_before_the_last_group(three_updates, tmp_path):
    for mode in ("sync", "periodic"):
        run(three_updates | {"run.name": mode, "train.mode": mode, "train.steps": 2}, tmp_path)
        check_report(steps(tmp_path, mode), 2)
        assert len(spans(tmp_path, mode, "update", 0)) == 2 * 3
    assert same(weights(tmp_path, "sync"), weights(tmp_path, "periodic"))
    run(three_updates | {"run.name": "one", "train.updates": 1, "train.steps": 2}, tmp_path)
    assert not same(weights(tmp_path, "one"), weights(tmp_path, "sync"))


@pytest.mark.nightly
@pytest.mark.parallel
@pytest.mark.timeout(600)
def test_replicas_share_every_mini_batch_and_a_killed_run_resumes_exactly(three_updates, tmp_path):
    exact = three_updates | {"parallel.data": 2, "reward.function": f"{REWARDS}:after_100_ms"}
    run(exact | {"run.name": "sync", "train.mode": "sync"}, tmp_path)
    check_report(steps(tmp_path, "sync"), 4)
    periodic = exact | {"run.name": "periodic", "checkpoint.every": 2}
    kill_a_rank(periodic, tmp_path)  # a checkpoint of half a step would show in the weights
    run(periodic, tmp_path, "--resume")
    check_report(steps(tmp_path, "periodic"), 4)
    assert same(weights(tmp_path, "sync"), weights(tmp_path, "periodic"))


@pytest.mark.nightly
@pytest.mark.parallel
@pytest.mark.timeout(600)
def test_a_pipeline_fills_once_for_what_is_held_for_an_update(three_updates, tmp_path):
    """A response in each micro-batch, four groups in a window and eight in an update: in periodic its two windows come
    two seconds apart, and are trained in one schedule."""
    short = {"rollout.max_new_tokens": 8, "rollout.max_context": 20, "train.micro_batch_tokens": 20}
    stages = three_updates | short | {"parallel.pipeline": 2, "train.updates": 2, "train.prompts_per_step": 16}
    stages |= {"reward.workers": 1, "train.steps": 2}
    late = {"reward.function": f"{REWARDS}:after_500_ms"}
    for mode in ("sync", "periodic"):
        run(stages | {"run.name": mode, "train.mode": mode} | (late if mode == "periodic" else {}), tmp_path)
        check_report(steps(tmp_path, mode), 2)
        trained = spans(tmp_path, mode, "train", 0)
        held = [span for span in trained if "groups" not in span]
        arrived = [span for span in trained if "groups" in span and span["groups"][0] >= 8]
        assert len(held) == 2
        assert all(span["micro_batches"] > 4 * 4 for span in held)  # a window holds four groups
        assert len(arrived) == (4 if mode == "periodic" else 2)
        assert sorted(sum((span["groups"] for span in arrived), [])) == sorted([*range(8, 16)] * 2)
        bubbles = [span["end"] for span in spans(tmp_path, mode, "bubble") if span["lane"] == "trainer-0 bubble"]
        assert {span["end"] for span in held} <= set(bubbles)
    assert same(weights(tmp_path, "sync"), weights(tmp_path, "periodic"))


@pytest.mark.nightly
@pytest.mark.parallel
@pytest.mark.timeout(600)
def test_a_record_of_mini_batches_in_order_of_arrival_replays_exactly(three_updates, tmp_path):
    live = three_updates | {"train.consume": "arrival", "rollout.concurrency": 2, "parallel.data": 2, "train.steps": 2}
    run(live | {"run.name": "live", "train.record": True}, tmp_path)
    run(live | {"run.name": "again"}, tmp_path, "--replay", str(tmp_path / "live/record.msgpack"))
    assert same(weights(tmp_path, "live"), weights(tmp_path, "again"))
    figures = ("loss", "grad_norm", "kl", "old_ratio_max", "max_ratio_gap", "clip_fraction", "trained_tokens")
    for mine, theirs in zip(steps(tmp_path, "live"), steps(tmp_path, "again"), strict=True):
        assert [mine[key] for key in figures] == [theirs[key] for key in figures]


@pytest.mark.slow
def test_the_one_step_off_recipe_in_small(tiny_model, tmp_path):
    """Two batches of four updates: data one step old, ratios to the policy at the step's start, DAPO with dual clip."""
    lines = start_small(
        RECIPES / "papers/one-step-off-qwen2.5-math-7b.toml",
        tmp_path,
        tiny_model,
        {
            "train.updates": 4,
            "train.prompts_per_step": 8,
            "train.steps": 2,
            "train.learning_rate": 1e-3,
            "reward.function": f"{REWARDS}:even",
        },
    )
    assert [line["versions_seen"] for line in lines] == [[0], [0]]
    assert [line["staleness_mean"] for line in lines] == [0, 1]
    assert len(spans(tmp_path, "small", "update", 0)) == 2 * 4
    for line in lines:
        assert line["old_ratio_max"] > 1.0 + 1e-4
        assert line["grad_norm"] > 0
        assert 0 <= line["clip_fraction"] < 1


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", SHIPPED, ids=lambda path: path.stem)
def test_a_recipe_starts(recipe, tiny_model, tmp_path):
    """On rows of its own set's schema, to the end of its first step."""
    assert len(start_small(recipe, tmp_path, tiny_model)) == 1


def start_small(recipe, folder, model, keys=None):
    """Train a recipe's small copy: the lines of steps.jsonl."""
    given = sets(*overrides(small(recipe, folder, model) | (keys or {})))
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "train", str(recipe), *given], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return steps(folder, "small")


@pytest.mark.nightly
def test_the_decoupled_loss_on_data_of_one_step_before(settings, tmp_path):
    """Clipped against the policy at the step's start, weighed against the weights that sampled: on-policy data are kept
    whole, responses of older weights that differ too much are dropped, and the record replays."""
    decoupled = settings | {
        "train.mode": "one_step_off",
        "train.updates": 2,
        "train.steps": 4,
        "train.learning_rate": 1e-3,
        "algorithm.old_policy": "behavior",
        "algorithm.mismatch": "truncate",
        "algorithm.mismatch_reject": "sequence",
        "algorithm.mismatch_reject_limit": 1.05,
    }
    run(decoupled | {"run.name": "live", "train.record": True}, tmp_path)
    lines = steps(tmp_path, "live")
    assert [line["versions_seen"] for line in lines] == [[0], [0], [1], [2]]
    assert lines[0]["mismatch_dropped"] == 0
    assert all(0 < line["mismatch_dropped"] < 1 for line in lines[1:])
    run(decoupled | {"run.name": "again"}, tmp_path, "--replay", str(tmp_path / "live/record.msgpack"))
    assert same(weights(tmp_path, "live"), weights(tmp_path, "again"))
    run(decoupled | {"run.name": "whole", "algorithm.mismatch_reject": "none"}, tmp_path)
    assert [line["mismatch_dropped"] for line in steps(tmp_path, "whole")] == [0] * 4
    assert not same(weights(tmp_path, "live"), weights(tmp_path, "whole"))
