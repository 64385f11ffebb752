"""Against closed forms."""

import pytest

from engine.tools.planner.costs import Costs, RowSize
from engine.tools.planner.simulation import SampledGroup, SimulatedInstance

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


def test_a_slowdown_stretches_the_rest():
    instance = SimulatedInstance("i", costs(decode_step=0.01))
    instance.begin_group(SampledGroup(0, 0, 1, (100,)), 0.0)
    instance.advance(0.4)
    instance.slowdown = 2.0
    assert instance.next_finish() == pytest.approx(0.4 + 2 * 0.6)
    instance.slowdown = float("inf")
    assert instance.next_finish() is None


def test_a_pipeline_computes_a_stage_of_each_micro_batch_at_a_time():
    made = costs(window=1.0, micro_batch=0.5, token=0.01, square=1e-4)
    rows = [RowSize(100, 2000.0)] * 4
    each = 0.5 + 1.0 + 0.2
    assert made.window_s(rows) == pytest.approx(1 + 4 * each)
    assert made.window_s(rows, pipeline=2) == pytest.approx(1 + (2 - 1 + 4) * each / 2)
    assert made.window_s([]) == 1.0
