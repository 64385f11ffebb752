"""Real ranks over gloo against transformers in fp32: log-probabilities, loss, KL, entropy and every gradient tensor.

All cases of a world size run in the same processes, started once (harness.py). The factors are combined pairwise.
"""

import math
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

LOW = 0.005
"""What gradient alignment control turns the cosine of consecutive gradients to."""

BF16 = 0.1
"""Roundings of 2^-9 each, through a model of random weights."""

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
    dp4 = {"expert": 2, "data": 4}
    return [Case(f"ep2-{name}", layout, "qwen3_moe", loss=loss, tolerance=1e-4, **factors) for name, layout, loss, factors in (
        ("one-rank", {}, "full", {}),
        ("dp2-odd", dp, "full", {"budget": SMALL, "deal": (((0, 1), (2,)),)}),
        ("dp2-one-row", dp, "plain", {"temperature": 0.7, "deal": (((0, 1, 2),),)}),
        ("dp2-separate", dp, "full", {"shared": False, "tied": True, "early": True}),
        ("tp2sp", sp, "full", {"budget": SMALL}),
        ("cp2", cp, "full", {"temperature": 0.7}),
        ("dp4-unequal", dp4, "full", {"budget": SMALL, "groups": "many", "deal": (((0, 1, 2), (3,)), ((4,),))}),
        ("dp4-idle", dp4, "plain", {"deal": ((), ((0,), (1, 2)))}),
        ("pp2dp2", {"expert": 2, "data": 2, "pipeline": 2}, "full", {"budget": SMALL, "temperature": 0.7}),
    )]  # fmt: skip


def options():
    """What may not change a gradient: recomputation, a sharded optimizer, replicas with nothing to do."""
    recompute, sharded = {"train.recompute": True}, {"train.distributed_optimizer": True}
    bf16 = {"train.dtype": "bfloat16", "train.ratio_gap_limit": 0}
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
        Case("early-cp2", TWO["cp2"], loss="full", early=True),
        Case("early-pp2cp2", MORE["pp2cp2"], loss="full", early=True, budget=SMALL, deal=(((0, 1, 2),),)),
        Case("bf16", {}, settings=bf16, tolerance=BF16),
        Case("bf16-tp2sp", TWO["tp2sp"], settings=bf16, tolerance=BF16),
    ]


def controlled():
    """The second of two steps under gradient alignment control. The cosine of these two is about -0.02."""
    settings = {"algorithm.gradient_control": "gac", "algorithm.gac_low": LOW, "algorithm.gac_high": 0.9,
                "train.learning_rate": 1e-12, "train.max_grad_norm": 1e6}  # fmt: skip
    sharded = settings | {"train.distributed_optimizer": True}
    return [
        Case(f"control-{name}", layout, tied=tied, groups="many", before="mixed",
             settings=sharded if "sharded" in name else settings)
        for name, layout, tied in (
            ("one", {}, True), ("tp2sp", TWO["tp2sp"], True), ("pp2", TWO["pp2"], True), ("dp2", TWO["dp2"], False),
            ("sharded-dp2", TWO["dp2"], False), ("tp2dp2", FOUR["tp2dp2"], True), ("pp2dp2", FOUR["pp2dp2"], True),
        )
    ]  # fmt: skip


def held():
    """Losses of batch scope with ratios to an old policy: statistics over the tokens of all replicas."""
    settings = {"train.mode": "sync", "algorithm.m2_threshold": 1e-3, "algorithm.bapo_share": 0.51}
    uneven, idle = (((0, 1), (4,), (2,)), ((3,),)), ((), ((0, 1, 2, 3, 4),))
    return [
        Case(f"held-{loss}-{name}", layout, tied=True, groups="many", loss="full", budget=budget, deal=deal,
             settings={"algorithm.loss": loss, **settings})
        for loss in ("m2po", "bapo")
        for name, layout, budget, deal in (
            ("one", {}, LARGE, ()), ("tp2sp", TWO["tp2sp"], SMALL, ()), ("pp2", TWO["pp2"], SMALL, ()),
            ("cp2", TWO["cp2"], LARGE, ()), ("dp2", TWO["dp2"], SMALL, uneven), ("idle-dp2", TWO["dp2"], LARGE, idle),
            ("tp2dp2", FOUR["tp2dp2"], LARGE, ()), ("pp2dp2", FOUR["pp2dp2"], LARGE, ()),
        )
    ]  # fmt: skip


def sequences():
    """gspo's mean over a response needs its tokens on all context ranks, also where one of them holds none of it."""
    return [
        Case(f"gspo-{name}", layout, tied=True, groups="many", loss="full", budget=budget, deal=deal,
             settings={"algorithm.loss": "gspo", "algorithm.clip_low": 0.02, "algorithm.clip_high": 0.02})
        for name, layout, budget, deal in (
            ("one", {}, LARGE, ()), ("cp2", TWO["cp2"], LARGE, ()), ("small-cp2", TWO["cp2"], SMALL, ()),
            ("one-row-cp2", TWO["cp2"], LARGE, (((0, 1, 2, 3, 4),),)),
        )
    ]  # fmt: skip


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
    *matrix(ONE, 6), *group_sizes(), *matrix(TWO, 6), *matrix(FOUR, 6), *matrix(MORE, 3), *mixtures(), *options(),
    *any_split(8, 1, "one", {}, 1), *any_split(8, 2, "dp2", TWO["dp2"], 2), *any_split(4, 3, "pp2", TWO["pp2"], 1),
    *any_split(3, 4, "dp4", {"data": 4}, 4),
]  # fmt: skip
SLICES = [
    Case("slices-tp2", TWO["tp2"], "logprobs"),
    Case("slices-tp4", {"tensor": 4}, "logprobs"),
]
SECONDS = {1: 150, 2: 300, 4: 300}
"""Deadline of all cases of a world size."""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    return Worlds(tmp_path_factory.mktemp("parallel"))


@pytest.fixture(scope="module")
def outcomes(worlds, request):
    """Looks a case's outcome up; runs a world size at the first question, all its selected cases at once."""
    parameters = [value for item in request.session.items if hasattr(item, "callspec") for value in item.callspec.params.values()]
    selected = {case.name: case for case in parameters if isinstance(case, Case)}
    found = {}

    def outcome(case):
        if case.name not in found:
            due = selected | {case.name: case}
            cases = [one for one in due.values() if one.world == case.world and one.name not in found]
            found.update(worlds.run(sorted(cases, key=lambda one: str(one.layout)), SECONDS[case.world]))
        return found[case.name]

    return outcome


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def expected(worlds, case):
    return worlds.expected(case.model, case.groups, case.temperature, case.loss)


@named(CASES)
def test_transformers_agrees(case, outcomes, worlds):
    check(case, outcomes(case), expected(worlds, case))


@named(SLICES)
def test_vocabulary_in_slices(case, outcomes):
    """token_logprobs itself, also of no tokens, and on ranks whose slice is all padding."""
    for rank in outcomes(case).ranks():
        assert len(rank["errors"]) == 12
        assert max(rank["errors"].values()) < 5e-6, rank["errors"]


PAIRS = [
    pytest.param(one, other, id=f"{one.name} {other.name}")
    for one, other in zip(group_sizes()[0::3], group_sizes()[2::3], strict=True)
]


@pytest.mark.parametrize(("case", "separate"), PAIRS)
def test_a_shared_prompt_is_the_same_responses_alone(case, separate, outcomes):
    (ours,), (theirs,) = outcomes(case).ranks(), outcomes(separate).ranks()
    assert ours["figures"]["computed_tokens"] <= theirs["figures"]["computed_tokens"]
    for name, gradient in theirs["gradients"].items():
        assert torch.norm(ours["gradients"][name] - gradient) <= 1e-5 * torch.norm(gradient), name


@pytest.mark.parametrize("name", ["dp2", "tp2dp2"])
def test_a_sharded_optimizer_makes_the_same_update(name, outcomes):
    """One step of Adam at a rate at which it is seen; the gradients are the same bit for bit, since two terms commute."""
    whole, sharded = (
        next(case for case in CASES if case.name == f"{kind}-{name}") for kind in ("whole", "sharded")
    )  # fmt: skip
    for ours, theirs in zip(outcomes(sharded).ranks(), outcomes(whole).ranks(), strict=True):
        assert ours["weights"].keys() == theirs["weights"].keys()
        for key, weight in theirs["weights"].items():
            torch.testing.assert_close(ours["weights"][key], weight, rtol=1e-6, atol=1e-7, msg=key)


@named(controlled())
def test_gradient_control_is_the_same_in_every_layout(case, outcomes, worlds):
    """The cosine is that of transformers' gradients, every parameter counted once; after projection it is LOW."""
    first, second = (worlds.expected(case.model, groups, 1.0, "plain").gradients for groups in (case.before, case.groups))
    cosine = product(first, second) / math.sqrt(product(first, first) * product(second, second))
    assert LOW < abs(cosine) < 0.9
    for rank in outcomes(case).ranks():
        assert rank["figures"]["grad_cosine"] == pytest.approx(cosine, rel=1e-4)
        assert rank["figures"]["skipped_updates"] == 0
    if not case.settings.get("train.distributed_optimizer"):  # there no rank has the whole gradient
        turned = {name: tensor for rank in outcomes(case).ranks() for name, tensor in rank["turned"].items()}
        found = product(first, turned) / math.sqrt(product(first, first) * product(turned, turned))
        assert found == pytest.approx(math.copysign(LOW, cosine), abs=1e-5)


@named(held())
def test_losses_of_batch_scope_are_the_same_in_every_layout(case, outcomes):
    """As on one rank, whose statistics the unit tests compare with transformers."""
    loss = case.settings["algorithm.loss"]
    (one,) = outcomes(next(other for other in held() if other.name == f"held-{loss}-one")).ranks()
    assert 0 < one["figures"]["clip_fraction"] < 0.9
    for rank in outcomes(case).ranks():
        for name in ("loss", "clip_fraction"):
            assert rank["figures"][name] == pytest.approx(one["figures"][name], rel=1e-4, abs=1e-6)
        for name, gradient in rank["gradients"].items():
            assert torch.norm(gradient - one["gradients"][name]) <= 1e-4 * torch.norm(one["gradients"][name]), name


@named(sequences())
def test_a_sequence_ratio_is_the_same_in_every_layout(case, outcomes):
    """As on one rank; the unit tests compare that with NumPy."""
    (one,) = outcomes(sequences()[0]).ranks()
    assert 0 < one["figures"]["clip_fraction"] < 0.9
    for rank in outcomes(case).ranks():
        for name in ("loss", "clip_fraction"):
            assert rank["figures"][name] == pytest.approx(one["figures"][name], rel=1e-4, abs=1e-6)
        for name, gradient in rank["gradients"].items():
            assert torch.norm(gradient - one["gradients"][name]) <= 1e-4 * torch.norm(one["gradients"][name]), name


def product(one, other):
    return sum(float((one[name].double() * other[name].double()).sum()) for name in one)


def test_the_full_loss_clips(worlds):
    """Or its cases would not test what they are there for."""
    worlds.models(CASES)
    assert 0.05 < worlds.expected("qwen3-untied", "mixed", 1.0, "full").clipped < 0.5
