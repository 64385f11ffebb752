"""The search, and the command on top of it."""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from engine.config import Config
from engine.config.recipe import load_config
from engine.errors import BadInput
from engine.tools.dry_run.model_shape import shape_of
from engine.tools.planner.costs import DEVICES, Costs
from engine.tools.planner.lengths import Lengths
from engine.tools.planner.planning import (
    StepModel,
    find_plan,
    on_cores,
    plan_sensitivity,
    prior_costs,
    prior_model,
    scale_costs,
    transfer_seconds,
)
from engine.tools.planner.search import (
    Ranked,
    bound_s,
    candidate_settings,
    change_config,
    core_layout,
    search_settings,
)
from engine.tools.planner.simulation import simulate_run
from tasks.commands.plan import make_plan

RECIPE = "infra/recipes/papers/periodic-qwen3-8b-16npu.toml"
LENGTHS = Lengths.drawn(3000, 12000, 200, 14336, count=256)


@pytest.fixture(scope="module")
def recipe():
    return load_config(RECIPE)


@pytest.fixture(scope="module")
def shape(recipe):
    return prior_model(recipe, DEVICES["910b"], LENGTHS).shape


def searched(config, shape, count, **more):
    """The best settings on so many 910B, and how many were considered."""
    return search_settings(
        config, shape, count, lambda made: prior_costs(shape, made, DEVICES["910b"]), LENGTHS, **more
    )


def test_every_setting_uses_the_devices_and_no_more(recipe, shape):
    found = list(candidate_settings(recipe, shape, 16))
    assert len(found) > 500
    for keys in found:
        ranks = keys["parallel.tensor"] * keys["parallel.pipeline"] * keys["parallel.context"] * keys["parallel.data"]
        instances = keys.get("dry_run.joining", keys.get("rollout.instances"))
        assert ranks + instances * keys["rollout.tensor"] <= 16
        assert instances >= 1
        assert recipe.train.prompts_per_step % keys["parallel.data"] == 0
    assert {keys["train.mode"] for keys in found} == {"sync", "periodic"}  # never silently off-policy


def test_the_best_is_the_fastest_of_all_that_fit(recipe, shape):
    best, looked = searched(recipe, shape, 16, kept=6)
    assert looked > 500
    times = [one.step_s for one in best]
    assert times == sorted(times)
    assert len(best) == 6
    assert all(one.devices <= 16 for one in best)
    assert all(one.candidate.bound_s <= one.step_s * 1.1 for one in best)
    assert not any({"train.recompute", "train.offload"} & set(one.candidate.changes) for one in best)
    with pytest.raises(BadInput, match="--devices 1: none of 0 settings works: no layout fits that few"):
        searched(recipe, shape, 1)


def test_the_settings_that_are_simulated_are_those_of_the_best_bounds(recipe, shape, monkeypatch):
    monkeypatch.setattr("engine.tools.planner.search.ranked_of", lambda one, *_: Ranked(one, one.bound_s, None))
    monkeypatch.setattr("engine.tools.planner.search.plan_run", lambda config: None)  # all fit
    few, many = (searched(recipe, shape, 8, kept=kept)[0] for kept in (6, 10**6))
    assert [one.step_s for one in few] == [one.step_s for one in many[:6]]
    assert len(many) > 50


def test_a_layout_that_does_not_fit_into_memory_is_left_out(recipe, shape):
    small = change_config(recipe, {"platform.memory_gib": 30.0})
    with pytest.raises(BadInput, match=r"--devices 4: none of \d+ settings works: .*too little memory"):
        searched(small, shape, 4)


def test_where_nothing_fits_recomputation_and_offload_are_planned_and_said(recipe, shape):
    small = change_config(recipe, {"platform.memory_gib": 175.0})
    [best], _ = searched(small, shape, 2, kept=1)
    assert str(best.candidate).endswith("train.recompute=true train.offload=true")
    assert (best.candidate.config.train.recompute, best.candidate.config.train.offload) == (True, True)


def test_the_bound_is_below_the_simulation(recipe, shape):
    for keys in list(candidate_settings(recipe, shape, 16))[::97]:
        made = change_config(recipe, keys)
        costs = prior_costs(shape, made, DEVICES["910b"])
        assert bound_s(made, costs, LENGTHS) <= 1.15 * simulate_run(made, costs, LENGTHS).step_s


def test_priors_follow_the_arithmetic(recipe, shape):
    """Qwen3-8B: 8.19e9 parameters, 36 layers, 8 key-value heads of 128."""
    keys = {"parallel.tensor": 1, "parallel.context": 1, "parallel.sequence": False, "rollout.tensor": 1}
    plain = {"algorithm.old_policy": "behavior", "algorithm.kl_coef": 0, "train.recompute": False}
    alone = change_config(recipe, keys | plain)
    made = prior_costs(shape, alone, DEVICES["h100"])
    active = 8.19e9 - 151936 * 4096
    assert made.token == pytest.approx(6 * active / (989e12 * 0.35), rel=0.02)
    assert made.decode_response == pytest.approx(2 * active / (989e12 * 0.4), rel=0.02)
    assert made.decode_context == pytest.approx(2 * 2 * 36 * 8 * 128 / (3.35e12 * 0.7))
    assert made.decode_step == pytest.approx(2 * 8.19e9 / (3.35e12 * 0.7) + 36 * 5e-6, rel=0.02)
    wide = prior_costs(
        shape,
        change_config(alone, {"rollout.tensor": 4, "parallel.tensor": 4, "parallel.sequence": True}),
        DEVICES["h100"],
    )
    assert wide.decode_response == pytest.approx(made.decode_response / 4)
    assert made.token / 4 < wide.token < made.token
    again = prior_costs(shape, change_config(alone, {"train.recompute": "selective"}), DEVICES["h100"])
    elements = 2 * 4096 + 12288  # of a layer: the outputs of both norms and of SwiGLU
    assert again.token - made.token == pytest.approx(36 * 6 * elements / (3.35e12 * 0.7))
    for setting, passes in ((9, 6.5), (True, 8)):
        again = prior_costs(shape, change_config(alone, {"train.recompute": setting}), DEVICES["h100"])
        assert again.token == pytest.approx(passes / 6 * made.token)
    both = change_config(alone, {"algorithm.kl_coef": 0.1, "algorithm.old_policy": "previous"})
    copied = prior_costs(shape, change_config(both, {"train.offload": True}), DEVICES["h100"])
    kept = prior_costs(shape, both, DEVICES["h100"])
    assert copied.window - kept.window == pytest.approx(2 * 2 * 8.19e9 / 8e9, rel=0.02)  # two models, 8 GB/s
    assert scale_costs(replace(kept, window=1.0), kept, copied).window == pytest.approx(1 + 4 * 8.19 / 8, rel=0.02)
    slow = prior_costs(shape, change_config(alone, {"platform.network_gbps": 50}), DEVICES["h100"])
    assert slow.sync - made.sync == pytest.approx(2 * 8.19e9 / 12.5e9, rel=0.02)  # twice as long as with 100 Gbit/s
    measured = Costs(**{**vars(made), "token": 2 * made.token, "exceptions": {}, "source": "measured: a"})
    other = scale_costs(measured, made, wide)
    assert other.token == pytest.approx(2 * wide.token)
    assert other.source == "measured: a, scaled by prior, h100"


@pytest.mark.parametrize(
    ("nbytes", "bucket_mb", "seconds"),
    [(16.4e9, 256, 1.07), (16.4e9, 0, 0.52), (65.5e9, 256, 4.25), (65.5e9, 0, 2.05), (65.5e9, 2048, 1.68)],
)
def test_a_weight_sync_takes_its_bytes_and_its_buckets_messages(nbytes, bucket_mb, seconds):
    """The figures of docs/rollouts.md: Qwen3-8B and 32B in bf16 over 400 Gbit/s."""
    keys = ["weights.transport=nccl", f"weights.bucket_mb={bucket_mb}", "platform.network_gbps=400"]
    config = load_config(None, [*keys, "rollout.engine=vllm", "platform.device=cuda"])
    assert transfer_seconds(config, nbytes) == pytest.approx(seconds, abs=0.01)


def test_costs_on_other_cores_are_in_inverse_proportion():
    one = SimpleNamespace(trainer_threads=1, instance_threads=1, threads_per_core=1.0)
    two = SimpleNamespace(trainer_threads=2, instance_threads=1, threads_per_core=1.0)
    costs = Costs(*[1.0] * 10)
    made = on_cores(costs, one, two)
    assert (made.token, made.decode_step, made.sync) == (0.5, 1.0, 1.0)
    assert made.source == "given, scaled by the number of cores"
    assert on_cores(costs, one, one) is costs
    one.threads_per_core = 0.5
    made = on_cores(costs, one, two)
    assert (made.train_slowdown, made.rollout_slowdown) == (2.0, 2.0)


def shared_cores(monkeypatch, tiny_model, decode_step, token):
    """The plan of a recipe of one instance and one replica on two cores."""
    monkeypatch.setattr("engine.config.tree.usable_cores", lambda: {0, 1})
    monkeypatch.setattr("engine.tools.planner.search.usable_cores", lambda: {0, 1})
    costs = Costs(
        decode_step=decode_step,
        decode_response=decode_step / 10,
        decode_context=0.0,
        prefill_token=0.0,
        window=0.0,
        micro_batch=0.0,
        token=token,
        square=0.0,
        update=0.1,
        sync=0.1,
    )
    made = Config(
        model={"path": str(tiny_model)},
        train={"prompts_per_step": 16},
        rollout={"instances": 1, "group_size": 4, "concurrency": 4},
    )
    model = StepModel(
        config=made,
        shape=shape_of(str(tiny_model))[0],
        costs_of=partial(on_cores, costs, made),
        lengths=Lengths(((20, (50,) * 4),), "given"),
        assumptions={},
    )
    return find_plan(model, 2)


def test_on_shared_cores_each_layout_is_compared(monkeypatch, tiny_model):
    plan = shared_cores(monkeypatch, tiny_model, decode_step=0.002, token=0.002)
    best = {}
    for one in plan.best:
        best.setdefault(core_layout(one.candidate.config), one)
    assert set(best) == {(1, 1), (2, 2)}
    work = 16 * (20 + 200) * 0.002 / 2  # of the trainer alone, on both cores
    assert all(one.step_s > work for one in plan.best)
    assert best[2, 2].step_s < 0.75 * best[1, 1].step_s  # training bounds the step of the other: a core is idle
    assert "parallel.data=2 rollout.instances=2" in str(best[2, 2].candidate)


@pytest.mark.slow
def test_a_recipe_for_any_machine_is_planned_for_the_device_that_is_named(recipe, tmp_path, capsys):
    anywhere = change_config(
        recipe, {"platform.device": "auto", "platform.memory_gib": 1.0, "run.name": "night-7", "run.seed": 7}
    )
    out = tmp_path / "plan.toml"
    make_plan(anywhere, [], count=16, kind="h200", lengths="300,900", out=out)
    made = load_config(out)
    assert (made.platform.device, made.platform.memory_gib) == ("cuda", 139.8)
    assert made.parallel.ranks + made.dry_run.joining * made.rollout.tensor <= 16
    assert made.run.seed == 0
    assert made.run.name.startswith("plan-2")  # after the file and the time, another one each night
    for part in ("run", "model", "data", "train", "rollout", "algorithm", "evaluate"):
        changed = {"mode", "concurrency", "micro_batch_tokens", "tensor", "instances", "name", "seed"}
        ours, theirs = (getattr(one, part).model_dump(exclude=changed) for one in (made, anywhere))
        assert ours == theirs, part
    lines = out.read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r"[a-z_]+ = ", line)]
    assert all(lines[number - 1].startswith("# ") for number in keys)
    assert "# planned; the recipe has " in out.read_text()
    assert lines[lines.index('device = "cuda"') - 1] == "# of the device that is planned for (--device)"
    assert len(keys) < 60
    printed = capsys.readouterr().out.splitlines()
    [whole] = [number for number, line in enumerate(printed) if line.startswith("the whole run")]
    hours, low, high, device_hours = map(float, printed[whole + 2].removeprefix("the best setting").split()[:4])
    assert low <= hours <= high
    assert device_hours == pytest.approx(16 * hours, rel=0.01)


def test_the_plan_says_what_it_rests_on_and_what_else_would_be_best(recipe):
    model = prior_model(recipe, DEVICES["910b"], LENGTHS)
    plan = find_plan(model, 16, kept=3)
    assert model.assumptions["token"].endswith(" s (prior, 910b)")
    assert "given" in model.assumptions["lengths"]
    found = {one.name: one for one in plan_sensitivity(plan)}
    assert len(found) == 6
    assert min(one.gain for one in found.values()) >= 1
    assert found["responses twice as long"].today.step_s > plan.today.step_s
    assert found["trainer 20 % faster"].today.step_s <= plan.today.step_s
