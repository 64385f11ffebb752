"""The simulation against sums that can be done by hand, and against the rules of the modes."""

from dataclasses import replace

import pytest

from engine.config import Config
from engine.tools.planner.costs import Costs
from engine.tools.planner.lengths import Lengths
from engine.tools.planner.simulation import simulate_run

COSTS = Costs(
    decode_step=0.01,
    decode_response=0.0,
    decode_context=0.0,
    prefill_token=0.0,
    window=0.1,
    micro_batch=0.0,
    token=0.001,
    square=0.0,
    update=0.5,
    sync=0.25,
    overhead=0.05,
)
EQUAL = Lengths(((10, (100,) * 4),), "given")
PROMPTS = 8
UNEQUAL = Lengths.drawn(100, 350, 10, 600)


def config(mode="sync", instances=1, concurrency=2, **more):
    return Config(
        train={"mode": mode, "prompts_per_step": PROMPTS, "micro_batch_tokens": 410, **more.get("train", {})},
        rollout={
            "group_size": 4,
            "instances": instances,
            "concurrency": concurrency,
            "max_new_tokens": 600,
            "max_context": 700,
            **more.get("rollout", {}),
        },
        algorithm={"old_policy": "rollout", "kl_coef": 0, **more.get("algorithm", {})},
        weights=more.get("weights", {}),
        parallel=more.get("parallel", {}),
    )


GENERATION = PROMPTS / 2 * 100 * 0.01  # two groups at once, a hundred decode steps each
WINDOW = 0.1 + 0.001 * 410
REST = 0.25 + 0.5 + 0.05


def test_sync_is_the_sum_of_its_parts():
    found = simulate_run(config(), replace(COSTS, token=0.002), EQUAL)
    training = PROMPTS * 0.82 + 3 * 0.1  # all groups wait: windows of four, three and, since it might grow, one
    assert found.step_s == pytest.approx(GENERATION + training + REST)
    assert found.mean("wait_s") == pytest.approx(GENERATION)
    assert found.mean("train_s") == pytest.approx(training)
    assert found.mean("rollout_s") == pytest.approx(GENERATION)
    assert found.bound_by == "training"
    assert found.instances_busy == pytest.approx(GENERATION / found.step_s)


def test_periodic_trains_while_groups_arrive():
    """Two groups come each second and take 1.02 s to train: the trainer falls behind by 0.02 s each time."""
    found = simulate_run(config("periodic"), COSTS, EQUAL)
    assert found.step_s == pytest.approx(GENERATION / 4 + PROMPTS * WINDOW + REST)
    assert found.mean("wait_s") == pytest.approx(GENERATION / 4)


def test_a_slow_generation_bounds_periodic_by_its_last_group():
    found = simulate_run(config("periodic"), replace(COSTS, token=0.0001), EQUAL)
    window = 0.1 + 0.0001 * 410
    assert found.step_s == pytest.approx(GENERATION + 2 * window + REST)  # the last two groups come together
    assert found.bound_by == "rollout"


def test_more_instances_and_replicas_share_the_work():
    both = simulate_run(config(instances=2, parallel={"data": 2}), COSTS, EQUAL)
    assert both.step_s == pytest.approx(GENERATION / 2 + PROMPTS / 2 * WINDOW + REST)


def test_one_step_off_generates_the_next_batch_meanwhile():
    found = simulate_run(config("one_step_off"), COSTS, EQUAL, steps=6)
    assert found.mean("wait_s") == 0
    assert found.step_s == pytest.approx(max(GENERATION, PROMPTS * WINDOW) + REST, rel=0.2)
    assert found.step_s < simulate_run(config("periodic"), COSTS, EQUAL).step_s


MODES = [
    {"mode": "sync"},
    {"mode": "periodic"},
    {"mode": "one_step_off"},
    {"mode": "one_step_off", "weights": {"staged": True}},
    {"mode": "bounded", "train": {"max_staleness": 2}},
    {"mode": "bounded", "train": {"max_staleness": 2}, "weights": {"staged": True}},
    {"mode": "bounded", "train": {"max_staleness": 2, "exact_lag": True}},
    {"mode": "bounded", "train": {"max_staleness": 2, "exact_lag": True}, "weights": {"staged": True}},
    {"mode": "bounded", "train": {"max_staleness": 2}, "rollout": {"partial": True}},
    {"mode": "one_step_off", "weights": {"staged": True}, "rollout": {"partial": True}},
    {"mode": "sync", "train": {"updates": 2}},
    {"mode": "sync", "algorithm": {"advantage": "reinforce_plus_plus"}},
    {"mode": "one_step_off", "algorithm": {"loss": "m2po"}},
]


@pytest.mark.parametrize("more", MODES, ids=str)
@pytest.mark.parametrize("replica_groups", [1, 2])
@pytest.mark.parametrize("order", ["arrival", "prompt_order"])
def test_every_mode_trains_each_group_once_with_accepted_versions(more, replica_groups, order):
    """An unaccepted version, a second lease and steps that stand still raise."""
    tables = more | {"train": more.get("train", {}) | {"consume": order}}
    made = config(**tables, instances=3, parallel={"data": replica_groups})
    found = simulate_run(made, replace(COSTS, verify=0.01, orchestrator_token=1e-5), UNEQUAL, seed=3, steps=5)
    assert len(found.steps) == 4
    sampled = [span for span in found.spans if span["name"] == "rollout"]
    assert len(sampled) == len({(span["step"], span["group"], span["number"]) for span in sampled}) == 5 * PROMPTS * 4
    trained = [index for span in found.spans if span["name"] == "train" for index in span["groups"]]
    if more.get("train", {}).get("updates", 1) == 1 and more.get("algorithm", {}).get("loss") != "m2po":
        assert sorted(trained) == sorted(5 * list(range(PROMPTS)))
    for step in found.steps:
        assert step.seconds >= step.sync_s + step.train_s + step.update_s - 1e-9
        assert step.seconds > 0


def test_no_mode_is_slower_than_sync_nor_faster_than_its_busiest_side():
    sync = simulate_run(config(), COSTS, UNEQUAL)
    periodic = simulate_run(config("periodic"), COSTS, UNEQUAL)
    assert periodic.step_s <= sync.step_s
    assert periodic.step_s >= max(periodic.mean("train_s"), periodic.mean("rollout_s"))


def test_a_orchestrator_that_is_full_is_named():
    found = simulate_run(config("periodic"), replace(COSTS, orchestrator_token=0.01), EQUAL)
    assert found.bound_by == "orchestrator"
    assert found.step_s >= PROMPTS * 400 * 0.01


def test_work_on_the_same_cores_slows_both_sides():
    alone = simulate_run(config("periodic"), COSTS, EQUAL).step_s
    shared = replace(COSTS, train_slowdown=1.5, rollout_slowdown=1.5)
    assert simulate_run(config("periodic"), shared, EQUAL).step_s > 1.2 * alone
    assert simulate_run(config(), shared, EQUAL).step_s == simulate_run(config(), COSTS, EQUAL).step_s  # never at once
