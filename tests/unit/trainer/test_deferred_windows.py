"""Losses of batch scope in the trainer: statistics over the whole step, whatever its windows and micro-batches."""

import random
import time
from dataclasses import replace

import pytest
import torch

from engine.algorithm.batch_statistics import BatchTokens
from engine.algorithm.losses import LOSSES
from engine.config import Algorithm
from engine.errors import BadInput
from engine.run.trace import Trace, read_spans
from engine.trainer.deferred_windows import check_scope
from support import tiny_models
from support.policies import a_group, a_policy, gradients

pytestmark = pytest.mark.usefixtures("megatron")

NAMES = ("m2po", "bapo")
SHARE = 0.6
"""Of BAPO: more than these groups bring by themselves, so that its bounds must move."""


@pytest.fixture(scope="module")
def reference(tiny_model):
    """(group) → log π of its responses' tokens, by transformers, each response alone."""
    model = tiny_models.reference(tiny_model)
    return lambda group: [
        tiny_models.reference_logprobs(model, group.prompt.token_ids, member.token_ids) for member in group.responses
    ]


@pytest.fixture
def groups(reference):
    """Three groups as a policy that is now up to a factor of e away sampled them; some tokens are masked."""
    draw = random.Random(0)
    made = []
    for index in range(3):
        group = a_group(index=index, seed=index)
        responses = [
            replace(
                member,
                logprobs=tuple(float(now) - draw.uniform(-1, 1) * (index + 1) / 3 for now in logs),
                loss_mask=tuple(draw.random() < 0.8 for _ in logs),
            )
            for member, logs in zip(group.responses, reference(group), strict=True)
        ]
        made.append(replace(group, responses=tuple(responses)))
    return made


def policy_of(settings, name, **changes):
    return a_policy(
        settings,
        algorithm__loss=name,
        algorithm__old_policy="rollout",
        algorithm__kl_coef=0,
        train__mode="sync",
        algorithm__bapo__share=SHARE,
        **changes,
    )


def trained(policy, windows):
    policy.start_step()
    for window in windows:
        policy.accumulate(window)
    policy.reduce_gradients(12)
    return gradients(policy, 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_statistics_are_over_the_step_and_windows_change_nothing(settings, groups, reference, name):
    policy = policy_of(settings, name)
    whole = trained(policy, [groups])
    found = policy._statistics
    assert found == pytest.approx(expected(name, groups, reference), rel=1e-4)
    assert found != pytest.approx(expected(name, groups[:1], reference), rel=1e-2)  # or this test would show nothing
    assert sum(float(gradient.abs().sum()) for gradient in whole.values()) > 0
    for windows, budget in (([[group] for group in reversed(groups)], 4096), ([groups[:1], groups[1:]], 20)):
        split = policy_of(settings, name, train__micro_batch_tokens=budget)
        for key, gradient in trained(split, windows).items():
            assert torch.norm(gradient - whole[key]) <= 1e-5 * torch.norm(whole[key]), key
        assert split._statistics == pytest.approx(found, rel=1e-5)


def expected(name, groups, reference):
    logs = []
    advantages = []
    for group in groups:
        rewards = torch.tensor([score.value for score in group.scores])
        for advantage, member, now in zip(
            (rewards - rewards.mean()) / (rewards.std() + 1e-6), group.responses, reference(group), strict=True
        ):
            kept = torch.tensor(member.loss_mask)
            logs.append((now - torch.tensor(member.logprobs))[kept])
            advantages.append(advantage.expand(int(kept.sum())))
    return LOSSES[name].statistics(
        BatchTokens(torch.cat(logs), torch.cat(advantages)), Algorithm(bapo={"share": SHARE})
    )


def test_what_a_half_done_step_held_is_forgotten_and_its_gap_to_the_instances_was_known(settings, groups):
    policy = policy_of(settings, "m2po")
    whole = trained(policy, [groups])
    policy.start_step()
    policy.accumulate(groups[:2])  # the step is lost here
    assert policy.worst_gap() > 0.1
    for key, gradient in trained(policy, [groups]).items():
        assert torch.equal(gradient, whole[key]), key


def test_a_step_without_groups_has_no_gradient(settings):
    policy = policy_of(settings, "bapo")
    assert all(float(gradient.abs().max()) == 0 for gradient in trained(policy, []).values())


def test_ones_own_batch_scope_is_refused_in_periodic():
    with pytest.raises(
        BadInput, match=r'algorithm.loss = "mine.py:own" takes its statistics over the whole batch.*"periodic"'
    ):
        check_scope("mine.py:own", LOSSES["m2po"], "periodic")
    check_scope("mine.py:own", LOSSES["m2po"], "sync")
    check_scope("grpo", LOSSES["grpo"], "periodic")


def test_each_window_that_was_held_is_traced_and_a_sign_of_life_as_it_is_trained(settings, groups, tmp_path):
    policy = policy_of(settings, "bapo")
    policy.trace = Trace(tmp_path, "trainer")
    beats = []
    policy.heartbeat = lambda: beats.append(time.time())
    policy.start_step(4)
    for group in groups:
        policy.accumulate([group])
    assert beats == []
    policy.update(12)
    policy.trace.flush()
    spans = [span for span in read_spans(tmp_path) if span["name"] in ("train", "update")]
    assert [span["name"] for span in spans] == ["train"] * 6 + ["update"]
    assert all(span["step"] == 4 for span in spans)
    assert [span.get("groups") for span in spans[:3]] == [[0], [1], [2]]
    assert [span["micro_batches"] for span in spans[:6]] == [0] * 3 + [1] * 3
    assert [span["computed_tokens"] > 0 for span in spans[:6]] == [False] * 3 + [True] * 3
    assert len(beats) == 3
    assert all(span["end"] <= beat for span, beat in zip(spans[3:6], beats, strict=True))
