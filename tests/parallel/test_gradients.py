"""Real ranks over gloo against transformers in fp32: log-probabilities, loss, KL, entropy and every gradient tensor.

All cases of a world size run in the same processes, started once (harness.py). The factors are combined pairwise.
"""

import math

import pytest
import torch

from support.parallel.cases import Case
from support.parallel.harness import Worlds, check
from support.parallel.layouts import CASES, LOW, SLICES, controlled, group_sizes, held, replayed, sequences

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(600)]

SECONDS = {1: 150, 2: 300, 4: 360}
"""Deadline of all cases of a world size."""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    return Worlds(tmp_path_factory.mktemp("parallel"))


@pytest.fixture(scope="module")
def outcomes(worlds, request):
    """Looks a case's outcome up; runs a world size at the first question, all its selected cases at once."""
    parameters = [
        value for item in request.session.items if hasattr(item, "callspec") for value in item.callspec.params.values()
    ]
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
    if case.block:  # or it would not test what it is there for
        assert all(rank["onednn"] > 0 for rank in outcomes(case).ranks())


@named(SLICES)
def test_vocabulary_in_slices(case, outcomes):
    """token_logprobs itself, also of no tokens, and on ranks whose slice is all padding."""
    for rank in outcomes(case).ranks():
        assert len(rank["errors"]) == 24
        assert max(rank["errors"].values()) < 2e-5, rank["errors"]


PAIRS = [
    pytest.param(one, other, id=f"{one.name} {other.name}")
    for one, other in zip(group_sizes()[0::3], group_sizes()[2::3], strict=True)
]


@pytest.mark.parametrize(("case", "separate"), PAIRS)
def test_a_shared_prompt_is_the_same_responses_alone(case, separate, outcomes):
    (ours,) = outcomes(case).ranks()
    (theirs,) = outcomes(separate).ranks()
    assert ours["figures"]["computed_tokens"] <= theirs["figures"]["computed_tokens"]
    for name, gradient in theirs["gradients"].items():
        assert torch.norm(ours["gradients"][name] - gradient) <= 1e-5 * torch.norm(gradient), name


@pytest.mark.parametrize("name", ["dp2", "tp2dp2"])
def test_a_sharded_optimizer_makes_the_same_update(name, outcomes):
    """One step of Adam at a rate at which it is seen;
    the gradients are the same bit for bit, since two terms commute."""
    whole, sharded = (next(case for case in CASES if case.name == f"{kind}-{name}") for kind in ("whole", "sharded"))
    for ours, theirs in zip(outcomes(sharded).ranks(), outcomes(whole).ranks(), strict=True):
        assert ours["weights"].keys() == theirs["weights"].keys()
        for key, weight in theirs["weights"].items():
            torch.testing.assert_close(ours["weights"][key], weight, rtol=1e-6, atol=1e-7, msg=key)


@named(controlled())
def test_gradient_control_is_the_same_in_every_layout(case, outcomes, worlds):
    """The cosine is that of transformers' gradients, every parameter counted once; after projection it is LOW."""
    first, second = (
        worlds.expected(case.model, groups, 1.0, "plain").gradients for groups in (case.before, case.groups)
    )
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
        assert_as_on_one(rank, one, "loss", "clip_fraction")


@named(replayed())
def test_replayed_routes_are_the_same_in_every_layout(case, outcomes):
    """As on one rank; the unit tests compare that with a closed form."""
    (one,) = outcomes(replayed()[0]).ranks()
    near = 1e-6 if case.budget == replayed()[0].budget else 0.1  # a group that is split computes its prompt again
    for rank in outcomes(case).ranks():
        assert rank["figures"]["expert_load_max"] == pytest.approx(one["figures"]["expert_load_max"], rel=near)
        assert_as_on_one(rank, one, "loss")


@named(sequences())
def test_a_sequence_ratio_is_the_same_in_every_layout(case, outcomes):
    """As on one rank; the unit tests compare that with NumPy."""
    (one,) = outcomes(sequences()[0]).ranks()
    assert 0 < one["figures"]["clip_fraction"] < 0.9
    for rank in outcomes(case).ranks():
        assert_as_on_one(rank, one, "loss", "clip_fraction")


def assert_as_on_one(rank, one, *figures):
    """A rank of a layout has these figures and the gradients of one that is alone."""
    for name in figures:
        assert rank["figures"][name] == pytest.approx(one["figures"][name], rel=1e-4, abs=1e-6)
    for name, gradient in rank["gradients"].items():
        assert torch.norm(gradient - one["gradients"][name]) <= 1e-4 * torch.norm(one["gradients"][name]), name


def product(one, other):
    return sum(float((one[name].double() * other[name].double()).sum()) for name in one)


def test_the_full_loss_clips(worlds):
    """Or its cases would not test what they are there for."""
    worlds.models(CASES)
    assert 0.05 < worlds.expected("qwen3-untied", "mixed", 1.0, "full").clipped < 0.5
