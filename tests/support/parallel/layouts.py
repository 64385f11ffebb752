"""The cases of test_gradients.py: families, layouts, losses and options, combined pairwise."""

import random

from support.parallel.cases import GROUP_SETS, LARGE, SMALL, Case

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
    """`rows` of the six rows for each layout, and each loss for two rows in turn, one of them with a shared prompt."""
    for number, (name, layout) in enumerate(layouts.items()):
        for row in range(number, number + rows):
            kind, shared, budget, tied, temperature = PAIRWISE[row % len(PAIRWISE)]
            yield Case(
                name="-".join(
                    (
                        name or "one",
                        kind,
                        "shared" if shared else "separate",
                        "packed" if budget == LARGE else "small",
                        "tied" if tied else "untied",
                        str(temperature),
                    )
                ),
                layout=layout,
                kind=kind,
                tied=tied,
                shared=shared,
                budget=budget,
                temperature=temperature,
                loss="full" if (row // 2 + number) % 2 else "plain",
            )


def group_sizes():
    """Groups of 1, 2 and 8 responses, of very different lengths, shared or not."""
    return [
        Case(
            f"sizes-{size}-{'shared' if shared else 'separate'}-{budget}", {}, shared=shared, budget=budget, groups=size
        )
        for size in ("one", "two", "eight")
        for shared, budget in ((True, LARGE), (True, SMALL), (False, LARGE))
    ]


def wide():
    """Axes of size 4: stages in the middle of a pipeline, ranks that share a key-value head (there are 2),
    rows in 8 parts."""
    pipeline = {"pipeline": 4}
    context = {"context": 4}
    tensor = {"tensor": 4}
    sequence = {"tensor": 4, "sequence": True}
    four_layers = {"num_hidden_layers": 4}
    four_heads = {"num_key_value_heads": 4}
    at_once = (((0, 1, 2),),)
    return [
        Case(name, layout, kind, loss=loss, **factors)
        for name, layout, kind, loss, factors in (
            ("pp4-packed-tied", pipeline, "qwen3", "full", {"tied": True, "sizes": four_layers}),
            (
                "pp4-small-tied",
                pipeline,
                "qwen3",
                "plain",
                {"tied": True, "sizes": four_layers, "budget": SMALL, "deal": at_once},
            ),
            (
                "pp4-small-untied",
                pipeline,
                "llama",
                "full",
                {"sizes": four_layers, "budget": SMALL, "deal": at_once},
            ),
            ("pp4-packed-untied", pipeline, "qwen2", "plain", {"sizes": four_layers, "temperature": 0.7}),
            ("cp4-packed", context, "qwen3", "full", {"deal": at_once}),
            ("cp4-small", context, "qwen2", "plain", {"tied": True, "budget": SMALL, "temperature": 0.7}),
            ("tp4sp-four-heads", sequence, "qwen3", "full", {"sizes": four_heads, "budget": SMALL}),
            ("tp4sp-two-heads", sequence, "qwen3", "full", {"tied": True}),
            ("tp4-two-heads", tensor, "qwen2", "full", {"budget": SMALL}),
            ("tp4-two-heads-separate", tensor, "llama", "plain", {"tied": True, "shared": False, "temperature": 0.7}),
        )
    ]


def by_onednn():
    """With products as small as these models' by oneDNN,
    in blocks of so few tokens that each row has some and a rest."""
    return [
        Case(f"onednn-{name}", TWO[name], kind, tied, budget=budget, loss="full", block=8)
        for name, kind, tied, budget in (
            ("tp2", "qwen2", False, LARGE),
            ("tp2sp", "qwen3", True, LARGE),
            ("pp2", "llama", True, SMALL),
        )
    ]


def ratios():
    """To the log-probabilities that the instance gave (`old_policy = "rollout"`), clipped."""
    return [
        Case(f"rollout-{name}", layout, loss="rollout", budget=budget)
        for name, layout, budget in (("one", {}, LARGE), ("tp2sp", TWO["tp2sp"], LARGE), ("cp2", TWO["cp2"], SMALL))
    ]


def mixtures():
    """Qwen3-MoE: experts on two ranks, inside one replica and over replicas in lockstep,
    with unequal numbers of rows; all experts on each of two tensor ranks."""
    dp = {"expert": 2, "data": 2}
    sp = {"expert": 2, "tensor": 2, "sequence": True}
    cp = {"expert": 2, "context": 2}
    dp4 = {"expert": 2, "data": 4}
    return [
        Case(f"ep2-{name}", layout, "qwen3_moe", loss=loss, tolerance=1e-4, **factors)
        for name, layout, loss, factors in (
            ("one-rank", {}, "full", {}),
            ("dp2-odd", dp, "full", {"budget": SMALL, "deal": (((0, 1), (2,)),)}),
            ("dp2-one-row", dp, "plain", {"temperature": 0.7, "deal": (((0, 1, 2),),)}),
            ("dp2-separate", dp, "full", {"shared": False, "tied": True}),
            ("tp2sp", sp, "full", {"budget": SMALL}),
            ("cp2", cp, "full", {"temperature": 0.7}),
            ("dp4-unequal", dp4, "full", {"budget": SMALL, "groups": "many", "deal": (((0, 1, 2), (3,)), ((4,),))}),
            ("dp4-idle", dp4, "plain", {"deal": ((), ((0,), (1, 2)))}),
            ("pp2dp2", {"expert": 2, "data": 2, "pipeline": 2}, "full", {"budget": SMALL, "temperature": 0.7}),
        )
    ] + [Case("ep1-tp2sp", TWO["tp2sp"], "qwen3_moe", loss="full", tolerance=1e-4, budget=SMALL)]


def replayed():
    """Routes of an instance, in every layout of a mixture."""
    return [
        Case(f"routes-{name}", layout, "qwen3_moe", groups="many", loss="full", routed=True, **factors)
        for name, layout, factors in (
            ("one", {}, {}),
            ("ep2-tp2sp", {"expert": 2, "tensor": 2, "sequence": True}, {"budget": SMALL}),
            ("ep2-cp2", {"expert": 2, "context": 2}, {"settings": {"train.recompute": True}}),
            ("ep2-dp2", {"expert": 2, "data": 2}, {"budget": SMALL}),
            ("pp2", {"pipeline": 2}, {"settings": {"train.recompute": True}, "budget": SMALL}),
        )
    ]


def options():
    """What may not change a gradient: recomputation, a sharded optimizer, replicas with nothing to do."""
    recompute = {"train.recompute": True}
    sharded = {"train.distributed_optimizer": True}
    bf16 = {"train.dtype": "bfloat16", "train.ratio_gap_limit": 0}
    update = {"train.learning_rate": 1e-2, "train.max_grad_norm": 1e6}
    return [
        Case("recompute", {}, loss="full", settings=recompute),
        Case("recompute-tp2sp", TWO["tp2sp"], loss="full", settings=recompute),
        Case("selective-tp2sp", TWO["tp2sp"], loss="full", settings={"train.recompute": "selective"}),
        Case("recompute-pp2", TWO["pp2"], loss="full", settings=recompute, budget=SMALL),
        Case("idle-replica", TWO["dp2"], loss="full", deal=(((0, 1), (2,)), ())),
        Case("idle-replica-pp2dp2", FOUR["pp2dp2"], tied=True, deal=((), ((0, 1, 2),)), budget=SMALL),
        Case("whole-dp2", TWO["dp2"], tied=True, settings=update),
        Case("sharded-dp2", TWO["dp2"], tied=True, settings=update | sharded),
        Case("whole-tp2dp2", FOUR["tp2dp2"], settings=update),
        Case("sharded-tp2dp2", FOUR["tp2dp2"], settings=update | sharded),
        Case("offload", {}, loss="full", settings={"train.offload": True}),
        Case("offload-tp2", TWO["tp2"], loss="full", settings={"train.offload": True}),
        Case("offload-pp2", TWO["pp2"], loss="full", settings={"train.offload": True}, budget=SMALL),
        Case("bf16", {}, settings=bf16, tolerance=BF16),
        Case("bf16-tp2sp", TWO["tp2sp"], settings=bf16, tolerance=BF16),
    ]


def controlled():
    """The second of two steps under gradient alignment control. The cosine of these two is about -0.02."""
    settings = {
        "algorithm.gradient_control": "gac",
        "algorithm.gac_low": LOW,
        "algorithm.gac_high": 0.9,
        "train.learning_rate": 1e-12,
        "train.max_grad_norm": 1e6,
    }
    sharded = settings | {"train.distributed_optimizer": True}
    return [
        Case(
            f"control-{name}",
            layout,
            tied=tied,
            groups="many",
            before="mixed",
            settings=sharded if "sharded" in name else settings,
        )
        for name, layout, tied in (
            ("one", {}, True),
            ("tp2sp", TWO["tp2sp"], True),
            ("pp2", TWO["pp2"], True),
            ("dp2", TWO["dp2"], False),
            ("sharded-dp2", TWO["dp2"], False),
            ("tp2dp2", FOUR["tp2dp2"], True),
            ("pp2dp2", FOUR["pp2dp2"], True),
        )
    ]


def held():
    """Losses of batch scope with ratios to an old policy: statistics over the tokens of all replicas."""
    settings = {"train.mode": "sync", "algorithm.m2po.threshold": 1e-3, "algorithm.bapo.share": 0.51}
    uneven = (((0, 1), (4,), (2,)), ((3,),))
    idle = ((), ((0, 1, 2, 3, 4),))
    return [
        Case(
            f"held-{loss}-{name}",
            layout,
            tied=True,
            groups="many",
            loss="full",
            budget=budget,
            deal=deal,
            settings={"algorithm.loss": loss, **settings},
        )
        for loss in ("m2po", "bapo")
        for name, layout, budget, deal in (
            ("one", {}, LARGE, ()),
            ("tp2sp", TWO["tp2sp"], SMALL, ()),
            ("pp2", TWO["pp2"], SMALL, ()),
            ("cp2", TWO["cp2"], LARGE, ()),
            ("dp2", TWO["dp2"], SMALL, uneven),
            ("idle-dp2", TWO["dp2"], LARGE, idle),
            ("tp2dp2", FOUR["tp2dp2"], LARGE, ()),
            ("pp2dp2", FOUR["pp2dp2"], LARGE, ()),
        )
    ]


def sequences():
    """gspo's mean over a response needs its tokens on all context ranks, also where one of them holds none of it."""
    return [
        Case(
            f"gspo-{name}",
            layout,
            tied=True,
            groups="many",
            loss="full",
            budget=budget,
            deal=deal,
            settings={"algorithm.loss": "gspo", "algorithm.clip_low": 0.02, "algorithm.clip_high": 0.02},
        )
        for name, layout, budget, deal in (
            ("one", {}, LARGE, ()),
            ("cp2", TWO["cp2"], LARGE, ()),
            ("small-cp2", TWO["cp2"], SMALL, ()),
            ("one-row-cp2", TWO["cp2"], LARGE, (((0, 1, 2, 3, 4),),)),
        )
    ]


def any_split(count, seed, name, layout, replica_groups):
    """Random budgets, windows, orders and shares of the same step."""
    draw = random.Random(seed)
    for number in range(count):
        order = list(range(len(GROUP_SETS["many"])))
        draw.shuffle(order)
        deal = [[] for _ in range(replica_groups)]
        while order:
            size = draw.randint(1, len(order))
            draw.choice(deal).append(tuple(order[:size]))
            del order[:size]
        yield Case(
            f"split-{name}-{number}",
            layout,
            budget=draw.choice([1, 20, 33, 50, LARGE]),
            shared=draw.random() < 0.7,
            groups="many",
            deal=tuple(map(tuple, deal)),
            loss="full",
        )


CASES = [
    *matrix(ONE, 6),
    *group_sizes(),
    *matrix(TWO, 6),
    *matrix(FOUR, 6),
    *matrix(MORE, 3),
    *wide(),
    *mixtures(),
    *options(),
    *by_onednn(),
    *ratios(),
    *any_split(count=8, seed=1, name="one", layout={}, replica_groups=1),
    *any_split(count=8, seed=2, name="dp2", layout=TWO["dp2"], replica_groups=2),
    *any_split(count=4, seed=3, name="pp2", layout=TWO["pp2"], replica_groups=1),
    *any_split(count=3, seed=4, name="dp4", layout={"data": 4}, replica_groups=4),
]
SLICES = [
    Case("slices-tp2", TWO["tp2"], "logprobs"),
    Case("slices-tp4", {"tensor": 4}, "logprobs"),
]
