"""Several updates per batch (`train.updates`): each is what a step of its own on its mini-batch would be."""

import math
from dataclasses import replace

import pytest
import torch

from engine.config import Config
from engine.errors import BadInput
from engine.types import Score
from support.policies import a_group, a_policy

pytestmark = pytest.mark.usefixtures("megatron")

PLAIN = {
    "train__learning_rate": 1e-2,
    "train__schedule": "linear",
    "train__warmup_steps": 2,
    "algorithm__kl_coef": 0,
    "algorithm__old_policy": "behavior",
}


BATCH_SCOPE = {
    "algorithm__loss": "m2po",
    "algorithm__old_policy": "rollout",
    "algorithm__m2po__threshold": 0.2,
    "train__mode": "sync",
}
"""With this threshold some of an update's outward tokens are masked, and others are not."""


def batch():
    """Four groups, two for each of two updates. The second two have more tokens, and the last one equal scores."""
    lengths = [(7, 3, 12, 5), (7, 3, 12, 5), (9, 8, 2, 14), (6, 11, 1, 10)]
    groups = [replace(a_group(lengths[at], index=at, seed=at), mini_batch=at // 2) for at in range(4)]
    return [*groups[:3], replace(groups[3], scores=(Score(0.5),) * 4)]


def alone(groups):
    return [replace(group, mini_batch=0) for group in groups]


def update(policy, responses=8):
    policy.reduce_gradients(responses)
    policy.models.copy_policy_to_old()
    return policy.step_optimizer()


def step_of(policy, windows, updates):
    policy.start_step()
    for window in windows:
        policy.accumulate(window)
    return [update(policy) for _ in range(updates)]


def weights(policy):
    return {name: value.detach().clone() for name, value in policy.models.policy.named_parameters()}


def assert_equal_weights(ours, theirs):
    for name, value in weights(theirs).items():
        assert torch.equal(weights(ours)[name], value), name


@pytest.mark.parametrize(
    ("changes", "reference"),
    [
        ({"algorithm__old_policy": "rollout"}, {"algorithm__old_policy": "rollout"}),
        # the weights before the only update so far are those at the step's start
        ({}, {"algorithm__old_policy": "previous"}),
        ({"algorithm__loss": "dapo"}, {"algorithm__loss": "dapo", "algorithm__old_policy": "previous"}),
        ({"algorithm__advantage": "gpg"}, {"algorithm__advantage": "gpg", "algorithm__old_policy": "previous"}),
        (BATCH_SCOPE, BATCH_SCOPE),
    ],
    ids=["rollout", "behavior", "tokens", "gpg", "batch-scope"],
)
def test_two_updates_of_a_step_are_two_steps_on_half_the_batch(settings, changes, reference):
    ours = a_policy(settings, train__updates=2, train__prompts_per_step=4, train__steps=3, **(PLAIN | changes))
    theirs = a_policy(settings, train__prompts_per_step=2, train__steps=6, **(PLAIN | reference))
    groups = batch()
    found = step_of(ours, [groups[:2], groups[2:]], 2)
    expected = [*step_of(theirs, [alone(groups[:2])], 1), *step_of(theirs, [alone(groups[2:])], 1)]
    assert found == expected  # norms and learning rates
    assert found[0][1] < found[1][1]  # the warm-up counts updates
    assert ours._statistics == theirs._statistics
    assert all(map(math.isfinite, ours._statistics))  # some token is masked, or batch-scope would show nothing
    assert_equal_weights(ours, theirs)


def test_the_order_in_which_mini_batches_come_changes_nothing(settings):
    """In arrival order a replica group may get a window of the second mini-batch before the first one is trained."""
    changes = PLAIN | {"train__updates": 2}
    groups = batch()
    ours = a_policy(settings, **changes)
    theirs = a_policy(settings, **changes)
    assert step_of(ours, [groups[2:], groups[:2]], 2) == step_of(theirs, [groups[:2], groups[2:]], 2)
    assert_equal_weights(ours, theirs)


def test_the_gap_to_the_instances_is_of_the_weights_at_the_steps_start(settings):
    """Later updates have moved: a comparison under their weights would blame the instances."""
    groups = batch()
    policy = a_policy(settings, train__updates=2, **PLAIN)
    policy.start_step()
    policy.accumulate(groups[:2])
    policy.accumulate(groups[2:])
    gap = policy.worst_gap()
    tokens = policy.metrics.scored_tokens
    assert tokens == sum(len(response.token_ids) for group in groups for response in group.responses)
    update(policy)
    update(policy)
    assert (policy.worst_gap(), policy.metrics.scored_tokens) == (gap, tokens)
    assert policy.metrics.old_ratio_max > 1.0 + 1e-4  # the second update's ratio is to the step's first weights


def test_figures_are_over_all_updates(settings):
    groups = batch()
    policy = a_policy(settings, train__updates=2, **(PLAIN | {"algorithm__old_policy": "rollout"}))
    step_of(policy, [groups[:2], groups[2:]], 2)
    figures = policy.figures()
    assert figures["trained_tokens"] == 4 * 9 * 4 + 27 + 27 + 33 + 28
    losses = [loss / 8 for loss in policy.metrics.losses]
    assert losses[0] != losses[1]
    assert figures["loss"] == pytest.approx(sum(losses) / 2)


@pytest.mark.parametrize(
    ("failing", "at"), [("", 0), ("control_gradient", 1), ("control_gradient", 2), ("reduce_gradients", 2)]
)
def test_each_update_of_a_step_is_reduced_decided_and_made_in_turn(settings, monkeypatch, failing, at):
    """The old policy gets the weights from before the update, and nothing has moved while a user's control may fail."""
    policy = a_policy(settings, train__updates=2, **PLAIN)
    calls = []
    norms = []

    def note(owner, name):
        real = getattr(owner, name)

        def noted(*arguments):
            calls.append(name)
            if (name, calls.count(name)) == (failing, at):
                raise BadInput("a mistake of the user's")
            found = real(*arguments)
            if name == "step_optimizer":
                norms.append(found[0])
            return found

        monkeypatch.setattr(owner, name, noted)

    for name in ("reduce_gradients", "control_gradient", "step_optimizer"):
        note(policy, name)
    note(policy.models, "copy_policy_to_old")
    whole = ["reduce_gradients", "control_gradient", "copy_policy_to_old", "step_optimizer"] * 2
    policy.start_step()
    policy.accumulate(batch()[:2])
    policy.accumulate(batch()[2:])
    assert not policy.has_moved
    if failing:
        with pytest.raises(BadInput, match="a mistake of the user's"):
            policy.update(8)
        assert calls == whole[: len(calls)]
        assert policy.has_moved == (at == 2)
        return
    figures = policy.update(8)
    assert calls == whole
    assert policy.has_moved
    assert figures.keys() == {"update_s", "grad_norm", "learning_rate"}
    assert norms[0] != norms[1]
    assert figures["grad_norm"] == pytest.approx(sum(norms) / 2)
    policy.start_step()
    assert not policy.has_moved


def test_the_course_of_the_learning_rate_ends_with_the_last_update(settings):
    policy = a_policy(settings, train__updates=3, train__steps=2, **PLAIN)
    rates = []
    for _ in range(6):
        rates.append(policy.optimizer.param_groups[0]["lr"])
        policy.scheduler.step(increment=1)
    assert rates == pytest.approx([5e-3, 1e-2, 8e-3, 6e-3, 4e-3, 2e-3])


@pytest.mark.parametrize(
    ("train", "algorithm", "message"),
    [
        ({"prompts_per_step": 6, "updates": 4}, {}, r"train\.updates \(4\) must divide train\.prompts_per_step \(6\)"),
        ({"prompts_per_step": 8, "updates": 4}, {"old_policy": "previous"}, 'set it to "behavior"'),
    ],
)
def test_what_cannot_be_split_is_refused(train, algorithm, message):
    with pytest.raises(ValueError, match=message):
        Config(train=train, algorithm=algorithm)
