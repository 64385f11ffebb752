"""Micro-batches made of views of bytes are those made of tuples, bit for bit; each number is its own token's."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.trainer.micro_batches import micro_batches
from engine.trainer.ranks.packing import Packing
from engine.types import Group, Prompt, Response, Score
from engine.wire.columns import REFERENCE, open_group, pack_group
from support.policies import a_group, a_policy, advantages_with, gradients

STEP = 2


@st.composite
def responses(draw):
    count = draw(st.integers(0, 6))
    starts = sorted({0} | draw(st.sets(st.integers(0, count - 1)))) if count else []
    return Response(
        token_ids=tuple(draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count))),
        logprobs=tuple(draw(st.lists(st.floats(-9999, 0, width=32), min_size=count, max_size=count))),
        versions=tuple((start, draw(st.integers(0, STEP))) for start in starts),
        loss_mask=tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count))),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        text="",
        seed=0,
        instance="i",
    )


@st.composite
def windows(draw):
    made = []
    for index in range(draw(st.integers(1, 3))):
        members = tuple(draw(st.lists(responses(), min_size=2, max_size=4)))
        scores = tuple(Score(draw(st.floats(0, 1))) for _ in members)
        prompt = Prompt("p", "", "", tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))))
        count = sum(len(member.token_ids) for member in members)
        reference = np.array(draw(st.lists(st.floats(-99, 0, width=32), min_size=count, max_size=count)), np.float32)
        made.append(
            Group(
                step=STEP,
                index=index,
                prompt=prompt,
                responses=members,
                scores=scores,
                columns={REFERENCE: reference},
            )
        )
    return made


PACKINGS = st.builds(
    Packing,
    budget=st.integers(1, 40),
    shared_prompt=st.booleans(),
    multiple=st.just(8),
    context=st.sampled_from([(0, 1), (0, 2), (1, 2)]),
    share=st.sampled_from([(0, 1), (0, 2), (1, 2)]),
)
GROUP_ADVANTAGES = st.builds(advantages_with, loss=st.sampled_from(["grpo", "dapo"]), mask_truncated=st.booleans())


def tensors(batch):
    both = {field.name: getattr(one, field.name) for one in (batch, batch.layout) for field in fields(one)}
    return {name: value for name, value in both.items() if isinstance(value, torch.Tensor)}


@given(windows(), PACKINGS, GROUP_ADVANTAGES)
def test_views_and_tuples_make_the_same_micro_batches(window, packing, group_advantages):
    views = [open_group(pack_group(group)) for group in window]
    ours, theirs = (micro_batches(each, packing, group_advantages) for each in (views, window))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.layout.segments, one.layout.lengths) == (other.layout.segments, other.layout.lengths)
        found = tensors(one)
        expected = tensors(other)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert found[name].numpy().tobytes() == tensor.numpy().tobytes(), name


@given(windows(), PACKINGS, GROUP_ADVANTAGES)
def test_each_number_is_its_own_tokens(window, packing, group_advantages):
    """`kept` says which of the micro-batch's tokens this rank has."""
    for batch in micro_batches(window, packing, group_advantages):
        expected = []
        for place, (group, number) in enumerate(batch.members):
            response = group.responses[number]
            first = sum(len(one.token_ids) for one in group.responses[:number])
            advantage = group_advantages.advantages(group)[number].item()
            weights = group_advantages.weights(group, number).tolist()
            for at, logprob in enumerate(response.logprobs):
                behind = dict(response.versions)[max(start for start, _ in response.versions if start <= at)] < STEP
                reference = float(group.columns[REFERENCE][first + at])
                expected.append((logprob, advantage, weights[at], place, behind, reference))
        names = ("rollout", "advantages", "weights", "response", "behind", "reference")
        found = list(zip(*(getattr(batch, name).tolist() for name in names), strict=True))
        assert found == [expected[at] for at in batch.layout.kept.tolist()]


def test_a_window_of_which_one_group_lacks_the_reference_has_none():
    has = replace(a_group((2, 2)), columns={REFERENCE: np.zeros(4, np.float32)})
    lacks = replace(has, index=1, columns={})
    assert micro_batches([has], Packing(99), advantages_with())[0].reference is not None
    assert micro_batches([has, lacks], Packing(99), advantages_with())[0].reference is None


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("budget", [4096, 20])
def test_a_windows_column_takes_the_place_of_the_reference_bit_for_bit(settings, budget):
    """The reference that is loaded is another model than the one whose numbers the column has."""
    changes = {"algorithm__kl_coef": 0.1, "train__micro_batch_tokens": budget}
    groups = [a_group(seed=1), a_group((4, 0, 16, 1), index=1, seed=2)]
    theirs = a_policy(settings, **changes)
    theirs.models.reference.set([weight * 1.01 for weight in theirs.models.reference.weights])
    scored = theirs._frozen_scores(micro_batches(groups, theirs.packing, theirs.group_advantages))
    flat = torch.cat([one.reference for one in scored])  # responses stay in their order
    parts = flat.split([sum(len(one.token_ids) for one in group.responses) for group in groups])
    given = [
        open_group(pack_group(replace(group, columns={REFERENCE: part.numpy()})))
        for group, part in zip(groups, parts, strict=True)
    ]
    ours = a_policy(settings, **changes)
    found = []
    for policy, window in ((theirs, groups), (ours, given), (ours, groups)):
        policy.start_step()
        policy.accumulate(window)
        found.append((policy.metrics.losses, policy.metrics.kl, gradients(policy, 8)))
    assert found[0][:2] == found[1][:2] != found[2][:2]
    assert found[0][2].keys() == found[1][2].keys()
    assert all(torch.equal(found[1][2][name], grad) for name, grad in found[0][2].items())


@pytest.mark.usefixtures("megatron")
def test_without_a_kl_term_the_column_is_no_part_of_the_loss(settings):
    """Where only the reward reads it."""
    policy = a_policy(settings, algorithm__kl_coef=0)
    plain = a_group((4, 3))
    found = []
    for group in (plain, replace(plain, columns={REFERENCE: np.full(7, -np.inf, np.float32)})):
        policy.start_step()
        policy.accumulate([group])
        found.append(gradients(policy, 2))
    assert all(torch.equal(found[1][name], grad) for name, grad in found[0].items())


def test_a_window_that_was_packed_before_gives_the_same_gradient(settings):
    window = [a_group(seed=1), a_group((4, 0, 16, 1), index=1, seed=2)]
    found = []
    for ahead in (False, True):
        policy = a_policy(settings, train__micro_batch_tokens=20)
        policy.start_step()
        if ahead:
            policy.prepare(window)
            policy.group_advantages = None  # nothing is left to be packed
            policy.sums.add_window = lambda window: None
        policy.accumulate(window)
        found.append(gradients(policy, 8))
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


@pytest.mark.usefixtures("megatron")
def test_windows_given_as_one_have_the_bits_and_figures_of_single_ones(settings):
    groups = [a_group(index=i, seed=i, lengths=(5 + i, 3, 9, 2 + i)) for i in range(4)]
    found = []
    for windows in ([groups[:1], groups[1:2], groups[2:3], groups[3:]], [groups], [groups[:3], groups[3:]]):
        changes = {"algorithm__old_policy": "previous", "algorithm__kl_coef": 0.1, "train__micro_batch_tokens": 40}
        policy = a_policy(settings, **changes)
        policy.start_step()
        for window in windows:
            policy.accumulate(window)
        policy.update(16)
        figures = policy.figures()
        found.append(({name: figures[name] for name in ("loss", "kl", "mismatch_kl", "computed_tokens")}, policy))
    for figures, policy in found[1:]:
        assert figures == found[0][0]
        for (name, one), (_, other) in zip(policy.tensors(), found[0][1].tensors(), strict=True):
            assert torch.equal(one, other), name
