"""Real ranks over gloo against transformers in fp32: log-probabilities, loss, KL, entropy and every gradient tensor.

All cases of a world size run in the same processes, started once (harness.py). The factors are combined pairwise.
"""

import random

import pytest
import torch

from parallel.cases import GROUP_SETS, LARGE, SMALL, Case
from parallel.harness import Worlds, check

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(600)]

PAIRWISE = [
    ("qwen3", True, LARGE, True, 1.0),
    ("qwen3", False, SMALL, False, 0.7),
    ("qwen2", True, LARGE, False, 0.7),
    ("qwen2", False, SMALL, True, 1.0),
    ("llama", True, SMALL, True, 0.7),
    ("llama", False, LARGE, False, 1.0),
]
"""Family, shared prompt, budget (packed or not), tied, temperature: any two values of two factors meet."""

ONE = {"": {}}
TWO = {
    "tp2": {"tensor": 2},
    "tp2sp": {"tensor": 2, "sequence": True},
    "pp2": {"pipeline": 2},
    "cp2": {"context": 2},
    "dp2": {"data": 2},
}
FOUR = {
    "tp2pp2sp": {"tensor": 2, "pipeline": 2, "sequence": True},
    "tp2dp2": {"tensor": 2, "data": 2},
    "pp2dp2": {"pipeline": 2, "data": 2},
}
MORE = {
    "tp2cp2sp": {"tensor": 2, "context": 2, "sequence": True},
    "pp2cp2": {"pipeline": 2, "context": 2},
    "cp2dp2": {"context": 2, "data": 2},
}


def matrix(layouts, rows):
    """`rows` of the six rows for each layout, and both losses, in turn."""
    for number, (name, layout) in enumerate(layouts.items()):
        for row in range(number, number + rows):
            kind, shared, budget, tied, temperature = PAIRWISE[row % len(PAIRWISE)]
            yield Case(
                f"{name or 'one'}-{kind}-{'shared' if shared else 'separate'}-{'packed' if budget == LARGE else 'small'}"
                f"-{'tied' if tied else 'untied'}-{temperature}",
                layout, kind, tied, shared, budget, temperature, "full" if (row + number) % 2 else "plain",
                early=row % 3 == 0,
            )  # fmt: skip


def group_sizes():
    """Groups of 1, 2 and 8 responses, of very different lengths, shared or not."""
    return [
        Case(f"sizes-{size}-{'shared' if shared else 'separate'}-{budget}", {}, shared=shared, budget=budget, groups=size)
        for size in ("one", "two", "eight") for shared, budget in ((True, LARGE), (True, SMALL), (False, LARGE))
    ]  # fmt: skip


def mixtures():
    """Qwen3-MoE: experts on two ranks, inside one replica and over replicas in lockstep, with unequal numbers of rows."""
    dp, sp, cp = {"expert": 2, "data": 2}, {"expert": 2, "tensor": 2, "sequence": True}, {"expert": 2, "context": 2}
    return [Case(f"ep2-{name}", layout, "qwen3_moe", loss=loss, tolerance=1e-4, **factors) for name, layout, loss, factors in (
        ("one-rank", {}, "full", {}),
        ("dp2-odd", dp, "full", {"budget": SMALL, "deal": (((0, 1), (2,)),)}),
        ("dp2-one-row", dp, "plain", {"temperature": 0.7, "deal": (((0, 1, 2),),)}),
        ("dp2-separate", dp, "full", {"shared": False, "tied": True, "early": True}),
        ("tp2sp", sp, "full", {"budget": SMALL}),
        ("cp2", cp, "full", {"temperature": 0.7}),
        ("dp4-unequal", {"expert": 2, "data": 4}, "full", {"budget": SMALL, "groups": "many", "deal": (((0, 1, 2), (3,)), ((4,),))}),
        ("dp4-idle", {"expert": 2, "data": 4}, "plain", {"deal": ((), ((0,), (1, 2)))}),
        ("pp2dp2", {"expert": 2, "data": 2, "pipeline": 2}, "full", {"budget": SMALL, "temperature": 0.7}),
    )]  # fmt: skip


def options():
    """What may not change a gradient: recomputation, a sharded optimizer, replicas with nothing to do."""
    recompute, sharded = {"train.recompute": True}, {"train.distributed_optimizer": True}
    update = {"train.learning_rate": 1e-2, "train.max_grad_norm": 1e6}
    return [
        Case("recompute", {}, loss="full", settings=recompute),
        Case("recompute-tp2sp", TWO["tp2sp"], loss="full", settings=recompute),
        Case("recompute-pp2", TWO["pp2"], loss="full", settings=recompute, budget=SMALL),
        Case("idle-replica", TWO["dp2"], loss="full", deal=(((0, 1), (2,)), ())),
        Case("idle-replica-pp2dp2", FOUR["pp2dp2"], tied=True, deal=((), ((0, 1, 2),)), budget=SMALL),
        Case("whole-dp2", TWO["dp2"], tied=True, settings=update),
        Case("sharded-dp2", TWO["dp2"], tied=True, settings=update | sharded),
        Case("whole-tp2dp2", FOUR["tp2dp2"], settings=update),
        Case("sharded-tp2dp2", FOUR["tp2dp2"], settings=update | sharded),
        Case("offload", {}, loss="full", settings={"train.offload": True}),
    ]


def any_split(count, seed, name, layout, units):
    """Random budgets, windows, orders and shares of the same step."""
    draw = random.Random(seed)
    for number in range(count):
        order = list(range(len(GROUP_SETS["many"])))
        draw.shuffle(order)
        deal = [[] for _ in range(units)]
        while order:
            size = draw.randint(1, len(order))
            draw.choice(deal).append(tuple(order[:size]))
            del order[:size]
        yield Case(f"split-{name}-{number}", layout, budget=draw.choice([1, 20, 33, 50, LARGE]), shared=draw.random() < 0.7,
                   groups="many", deal=tuple(map(tuple, deal)), early=draw.random() < 0.3, loss="full")  # fmt: skip


CASES = [
    *matrix(ONE, 6), *group_sizes(), *matrix(TWO, 6), *matrix(FOUR, 4), *matrix(MORE, 2), *mixtures(), *options(),
    *any_split(8, 1, "one", {}, 1), *any_split(8, 2, "dp2", TWO["dp2"], 2), *any_split(4, 3, "pp2", TWO["pp2"], 1),
    *any_split(3, 4, "dp4", {"data": 4}, 4),
]  # fmt: skip
SECONDS = {1: 150, 2: 300, 4: 300}
"""Deadline of all cases of a world size."""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    return Worlds(tmp_path_factory.mktemp("parallel"))


@pytest.fixture(scope="module")
def outcomes(worlds, request):
    """Looks a case's outcome up; runs a world size at the first question, all its selected cases at once."""
    wanted = [getattr(item, "callspec", None) and item.callspec.params.get("case") for item in request.session.items]
    selected = [case for case in wanted if isinstance(case, Case)]
    found = {}

    def outcome(case):
        if case.name not in found:
            cases = sorted((one for one in selected if one.world == case.world), key=lambda one: str(one.layout))
            found.update(worlds.run(cases, SECONDS[case.world]))
        return found[case.name]

    return outcome


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def expected(worlds, case):
    return worlds.expected(case.model, case.groups, case.temperature, case.loss)


@named(CASES)
def test_transformers_agrees(case, outcomes, worlds):
    check(case, outcomes(case), expected(worlds, case))
