"""The simulation against sums that can be done by hand, and against the rules of the modes."""

from dataclasses import replace

import pytest

from engine.config import Config
from engine.tools.planner.costs import Costs, RowSize
from engine.tools.planner.lengths import Lengths
from engine.tools.planner.simulation import SampledGroup, SimulatedInstance, simulate_run

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


def test_periodic_trains_while_groups_arrive():
    """Two groups come each second and take 1.02 s to train: the trainer falls behind by 0.02 s each time."""
    found = simulate_run(config("periodic"), COSTS, EQUAL)
    assert found.step_s == pytest.approx(GENERATION / 4 + PROMPTS * WINDOW + REST)
    assert found.mean("wait_s") == pytest.approx(GENERATION / 4)


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


def test_work_on_the_same_cores_slows_both_sides():
    alone = simulate_run(config("periodic"), COSTS, EQUAL).step_s
    shared = replace(COSTS, train_slowdown=1.5, rollout_slowdown=1.5)
    assert simulate_run(config("periodic"), shared, EQUAL).step_s > 1.2 * alone
    assert simulate_run(config(), shared, EQUAL).step_s == simulate_run(config(), COSTS, EQUAL).step_s  # never at once


def test_a_pipeline_fills_once_for_the_windows_that_are_held_for_an_update():
    """Two updates of four groups, each of a micro-batch, on two stages. The held four are a schedule of their own,
    whatever windows they came in: 0.1 + 4 x 0.41 x (1 + 4) / (2 x 4)."""
    given = config("periodic", parallel={"pipeline": 2}, train={"updates": 2, "micro_batch_tokens": 410})
    found = simulate_run(given, COSTS, EQUAL)
    alone = 0.1 + 0.41 * 2 / 2
    first = 2 * alone + 0.1 + 2 * 0.41 * 3 / 4  # the second pair comes while the first is trained, one by one
    held = 0.1 + 4 * 0.41 * 5 / 8
    assert found.mean("train_s") == pytest.approx(first + held)


# an instance, against closed forms

NOTHING = {
    "decode_step": 0.0, "decode_response": 0.0, "decode_context": 0.0, "prefill_token": 0.0, "window": 0.0,
    "micro_batch": 0.0, "token": 0.0, "square": 0.0, "update": 0.0, "sync": 0.0,
}  # fmt: skip


def costs(**known):
    return Costs(**NOTHING | known)


def ends(instance, groups, starts):
    """When each response of the groups is finished, by (group, number)."""
    found = {}
    waiting = sorted(zip(starts, groups, strict=True), key=lambda each: each[0])
    while waiting or instance.responses:
        finish = instance.next_finish()
        if waiting and (finish is None or waiting[0][0] < finish):
            at, group = waiting.pop(0)
            instance.begin_group(group, at)
            continue
        group, number = instance.finish_response(finish)
        found[group.index, number] = finish
    return found


def test_a_response_alone_takes_a_decode_step_for_each_token():
    a = 0.01
    c = 1e-4
    prompt = 20
    length = 50
    instance = SimulatedInstance("i", costs(decode_step=a, decode_context=c))
    found = ends(instance, [SampledGroup(0, 0, prompt, (length,))], [3.0])
    # the context grows with each token: the integral of a + c (prompt + k) over k
    assert found[0, 0] == pytest.approx(3 + a * length + c * (prompt * length + length**2 / 2))
    assert instance.responses == 0


def test_responses_share_decode_steps_and_a_later_one_slows_the_first():
    a = 0.01
    b = 0.002
    instance = SimulatedInstance("i", costs(decode_step=a, decode_response=b))
    groups = [SampledGroup(0, 0, 5, (100, 40)), SampledGroup(0, 1, 5, (60,))]
    began = 10 * (a + 2 * b)  # when ten tokens of each are there
    found = ends(instance, groups, [0.0, began])
    first = began + 30 * (a + 3 * b)
    assert found[0, 1] == pytest.approx(first)
    second = first + 30 * (a + 2 * b)  # 60 of the third, and 70 of the longest
    assert found[1, 0] == pytest.approx(second)
    assert found[0, 0] == pytest.approx(second + 30 * (a + b))


def test_a_prompt_is_computed_once_for_its_group_and_all_wait_for_it():
    instance = SimulatedInstance("i", costs(decode_step=0.01, prefill_token=0.001))
    found = ends(instance, [SampledGroup(0, 0, 100, (10, 10)), SampledGroup(0, 1, 50, (10,))], [0.0, 0.15])
    assert found[0, 0] == found[0, 1] == pytest.approx(0.1 + 0.05 + 0.1)
    assert found[1, 0] == pytest.approx(0.15 + 0.05 + 0.1)


def test_a_pipeline_computes_a_stage_of_each_micro_batch_at_a_time():
    made = costs(window=1.0, micro_batch=0.5, token=0.01, square=1e-4)
    rows = [RowSize(100, 2000.0)] * 4
    each = 0.5 + 1.0 + 0.2
    assert made.window_s(rows) == pytest.approx(1 + 4 * each)
    assert made.window_s(rows, pipeline=2) == pytest.approx(1 + (2 - 1 + 4) * each / 2)
    assert made.window_s([]) == 1.0
