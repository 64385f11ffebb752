"""Costs found again in what they made."""

import json
import re
from dataclasses import replace
from statistics import fmean

import pytest

from engine.config import Config
from engine.errors import BadInput
from engine.tools.planner import calibration
from engine.tools.planner.calibration import (
    STEPS,
    describe_bound,
    fit_costs,
    measured_step_s,
    probe_run,
    probe_settings,
    read_run,
)
from engine.tools.planner.simulation import simulate_run
from support.simulated_runs import COSTS, LENGTHS, config, simulated_run, with_model


def test_a_runs_costs_predict_other_settings_of_it(tmp_path):
    settings = [("a", 4, 4096), ("b", 2, 4096), ("c", 4, 2048)]
    runs = [
        read_run(simulated_run(config(name, tmp_path, concurrency=how[0], budget=how[1]))) for name, *how in settings
    ]
    found = fit_costs(runs)
    assert found.sync == pytest.approx(0.1)
    assert found.update == pytest.approx(0.05)
    assert found.overhead == pytest.approx(0.02)
    assert found.train_slowdown == pytest.approx(1.2, abs=0.05)
    assert found.rollout_slowdown == pytest.approx(1.1, abs=0.05)
    assert found.decode_s(32, 32 * 200) == pytest.approx(COSTS.decode_s(32, 32 * 200), rel=0.02)
    assert "measured" in found.figures()["token"][1]
    assert found.figures()["orchestrator_token"][1] == "prior"
    for mode, concurrency, budget in (("sync", 4, 4096), ("periodic", 8, 3000), ("one_step_off", 2, 8192)):
        other = config("other", tmp_path, mode, concurrency=concurrency, budget=budget)
        predicted = fmean(simulate_run(other, found, LENGTHS, seed).step_s for seed in (5, 6))
        real = fmean(simulate_run(other, COSTS, LENGTHS, seed).step_s for seed in (5, 6))
        assert predicted == pytest.approx(real, rel=0.04)


def test_what_is_no_run_or_too_short_is_refused(tmp_path):
    with pytest.raises(BadInput, match="no config.toml there"):
        read_run(tmp_path / "nothing")
    folder = simulated_run(config("short", tmp_path), steps=1)
    with pytest.raises(BadInput, match="sizes of 0 responses and 0 windows"):
        read_run(folder)
    with pytest.raises(BadInput, match="few: 512 responses and 1 windows after the first step, and at least 8"):
        fit_costs([read_run(simulated_run(config("few", tmp_path, "sync", budget=120_000), steps=2))])


def test_what_bounds_the_last_steps_is_named_with_what_helps(tmp_path, tiny_model):
    slow = simulated_run(with_model(config("slow", tmp_path, "sync", concurrency=1), tiny_model), steps=6)
    end = f"; metronome plan --from {slow} predicts other settings"
    more = "more instances on further devices help"
    assert re.fullmatch(rf"rollout \(\d+% of a step\): {more}{end}", describe_bound(slow))
    assert len(read_run(slow, last=2).steps) == 2
    steps = slow / "steps.jsonl"
    lines = [json.loads(line) | {"response_length_tail": 0.4} for line in steps.read_text().splitlines()]
    steps.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "so more instances help little: shorten the longest (docs/concepts.md)" in describe_bound(slow)
    with pytest.raises(BadInput, match="no config.toml"):
        describe_bound(tmp_path / "nothing")


def test_a_wait_in_which_only_rewards_are_computed_is_one_for_rewards(tmp_path, tiny_model):
    """The same run, whose trainer would wait for a thousand seconds more in each step, for its scores."""
    folder = simulated_run(with_model(config("judged", tmp_path, "sync", concurrency=1), tiny_model), steps=6)
    spans = [json.loads(line) for line in (folder / "trace/all.jsonl").read_text().splitlines()]
    end = max(span["end"] for span in spans)
    late = {"start": end, "end": end + 6000.0, "step": 6}
    spans += [late | {"name": "wait", "lane": "trainer-0"}, late | {"name": "verify", "lane": "verifier", "group": 0}]
    (folder / "trace/all.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans))
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    lines = [line | {"wait_s": line["wait_s"] + 1000.0, "step_s": line["step_s"] + 1000.0} for line in lines]
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert re.match(r"rewards \(\d+% of a step\): a faster reward, more reward.workers or a", describe_bound(folder))


def test_the_advice_of_a_long_run_rests_on_its_last_steps_alone(tmp_path, tiny_model, monkeypatch):
    """Neither the figures of the steps before them nor their spans, of which a long run has gigabytes."""
    monkeypatch.setattr(calibration, "LAST_STEPS", 3)
    folder = simulated_run(with_model(config("long", tmp_path, "sync", concurrency=1), tiny_model), steps=6)
    told = describe_bound(folder)
    trace = folder / "trace/all.jsonl"
    spans = [json.loads(line) for line in trace.read_text().splitlines()]
    early = [span | {"end": span["end"] + 100.0} if span["step"] < 3 else span for span in spans]
    assert early != spans
    trace.write_text("".join(json.dumps(span) + "\n" for span in early))
    assert describe_bound(folder) == told


def test_ranks_that_share_a_units_tokens_count_them_once(tmp_path):
    """Two context ranks trace their halves of each window, and their tensor neighbours nothing."""
    made = config("shared", tmp_path)
    run = read_run(simulated_run(made))
    whole = fit_costs([run])
    layout = made.parallel.model_copy(update={"context": 2, "tensor": 2})
    halves = [span | {"computed_tokens": span["computed_tokens"] / 2} for span in run.trained]
    nothing = [span | {"computed_tokens": 0, "micro_batches": 0} for span in run.trained]
    shared = replace(
        run,
        config=made.model_copy(update={"parallel": layout}),
        spans=[*run.sampled, *halves, *[span | {"lane": "trainer-1"} for span in halves], *nothing],
    )
    found = fit_costs([shared])
    for name in ("window", "micro_batch", "token", "square"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name), rel=1e-6)


def test_probes_tell_the_costs_apart_and_are_short_runs_of_the_recipe(tmp_path):
    config = Config(
        run={"name": "mine", "output": str(tmp_path)},
        rollout={"concurrency": 3, "max_context": 512, "max_new_tokens": 64},
        train={"micro_batch_tokens": 2048, "warmup_steps": 20, "steps": 100, "record": True},
        evaluate={"every": 5},
    )
    keys = list(probe_settings(config))
    assert sorted(each["rollout.concurrency"] for each in keys) == [1, 3, 6, 12]
    assert {each.get("train.micro_batch_tokens", 2048) for each in keys} == {1024, 2048}
    assert {each.get("train.mode", config.train.mode) for each in keys} == {"sync", "periodic"}
    made = probe_run(config, keys[0], "mine-measure-1")
    assert (made.run.name, made.train.steps, made.train.mode) == ("mine-measure-1", STEPS, "sync")
    assert (made.evaluate.every, made.train.record, made.checkpoint.every) == (0, False, 0)
    assert made.rollout.max_new_tokens == 64
    large = config.model_copy(update={"train": config.train.model_copy(update={"micro_batch_tokens": 600})})
    assert {each.get("train.micro_batch_tokens") for each in probe_settings(large)} == {
        None
    }  # half would not hold a response
    made.folder.mkdir(parents=True)
    lines = [{"step": step, "step_s": seconds} for step, seconds in enumerate((50.0, 1.0, 3.0, 2.0))]
    (made.folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert measured_step_s(made) == 2.0
