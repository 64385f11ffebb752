"""The trained side against Hugging Face and plain autograd: one process, real Megatron."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.errors import BadInput, MetronomeError
from engine.types import Score
from support.policies import a_group, a_policy, advantages_with, assert_same, gradients, response

pytestmark = pytest.mark.usefixtures("megatron")


def hf_gradients(folder, groups, temperature=1.0):
    """Each response on its own through transformers; loss = −mean over responses of mean over tokens of A·logπ."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = 0.0
    count = 0
    for group in groups:
        rewards = torch.tensor([score.value for score in group.scores])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for advantage, member in zip(advantages, group.responses, strict=True):
            count += 1
            if not member.token_ids:
                continue
            prompt = list(group.prompt.token_ids)
            ids = torch.tensor(prompt + list(member.token_ids))
            logs = torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature, -1)
            chosen = logs.gather(-1, ids[len(prompt) :, None])[:, 0]
            mask = torch.tensor(member.loss_mask, dtype=torch.float32)
            total = total - advantage * (chosen * mask).sum() / mask.sum().clamp(min=1)
    (total / count).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("budget", [4096, 20])
def test_gradients_equal_hugging_face(settings, tiny_model, shared, temperature, budget):
    policy = a_policy(
        settings,
        algorithm__old_policy="behavior",
        algorithm__kl_coef=0,
        attention__shared_prompt=shared,
        rollout__temperature=temperature,
        train__micro_batch_tokens=budget,
    )
    groups = [a_group(seed=1), a_group((4, 0, 16, 1), index=1, seed=2)]
    policy.start_step()
    policy.accumulate(groups)
    assert_same(gradients(policy, 8), hf_gradients(tiny_model, groups, temperature))
    assert policy.metrics.trained_tokens == 4 * 9 * 2 + 27 + 21
    if shared and budget == 4096:
        assert policy.metrics.computed_tokens == 2 * 9 + 27 + 21


def test_a_probe_is_scored_at_temperature_1_as_instances_score_prompts(settings):
    found = [a_policy(settings, rollout__temperature=each).models.probe(range(3, 20)) for each in (1.0, 0.5)]
    assert found[0] == found[1]
    assert len(found[0]) == 16


def test_masked_tokens_leave_the_gradient(settings, tiny_model):
    policy = a_policy(settings, algorithm__old_policy="behavior", algorithm__kl_coef=0)
    plain = a_group()
    first = response(plain.responses[0].token_ids, mask=[True, False] * 3 + [True])
    masked = replace(plain, responses=(first, *plain.responses[1:]))
    policy.start_step()
    policy.accumulate([masked])
    assert_same(gradients(policy, 4), hf_gradients(tiny_model, [masked]))


def test_tokens_of_the_environment_are_in_no_figure(settings, tiny_model):
    """Whatever stands in the place of their log-probabilities: they have none."""
    found = []
    for logprob in (-1.0, 0.0):
        policy = a_policy(settings, algorithm__old_policy="rollout", algorithm__kl_coef=0.1)
        plain = a_group()
        first = response(plain.responses[0].token_ids, mask=[True, False, False] + [True] * 4)
        logprobs = [own if kept else logprob for own, kept in zip(first.logprobs, first.loss_mask, strict=True)]
        group = replace(plain, responses=(replace(first, logprobs=tuple(logprobs)), *plain.responses[1:]))
        policy.start_step()
        policy.accumulate([group])
        metrics = policy.metrics
        found.append((gradients(policy, 4), metrics.max_ratio_gap, metrics.mismatch_kl, metrics.old_ratio_max))
        assert metrics.scored_tokens == sum(sum(one.loss_mask) for one in group.responses)
    assert found[0][1:] == found[1][1:]
    assert_same(found[0][0], found[1][0])


def test_order_and_split_change_nothing_but_rounding(settings):
    groups = [a_group(index=i, seed=i, lengths=(5 + i, 3, 9, 2 + i)) for i in range(4)]
    found = []
    for windows, budget in (
        ([[0], [1], [2], [3]], 4096),
        ([[3, 1, 0, 2]], 4096),
        ([[0, 1], [2, 3]], 16),
        ([[2, 0, 1, 3]], 60),
    ):
        policy = a_policy(settings, train__micro_batch_tokens=budget)
        policy.start_step()
        for window in windows:
            policy.accumulate([groups[index] for index in window])
        found.append(gradients(policy, 16))
    for other in found[1:]:
        assert_same(other, found[0])


def test_previous_is_the_policy_before_the_last_update(settings):
    policy = a_policy(settings, algorithm__old_policy="previous")
    group = a_group()
    before = {name: p.detach().clone() for name, p in policy.models.policy.named_parameters()}
    policy.start_step()
    policy.accumulate([group])
    assert policy.metrics.old_ratio_max == pytest.approx(1.0, abs=1e-6)
    policy.reduce_gradients(4)
    policy.models.copy_policy_to_old()
    policy.step_optimizer()
    after = dict(policy.models.policy.named_parameters())
    for name, old in policy.models.old.model().named_parameters():
        assert torch.equal(old, before[name])
        assert not torch.equal(old, after[name])
    policy.start_step()
    policy.accumulate([group])
    assert policy.metrics.old_ratio_max > 1.0 + 1e-4


def test_the_decoupled_loss_without_bounds_is_the_unclipped_importance_ratio(settings):
    """w A ∇ log π with w = π_old/π_rollout, and r A ∇ log π with r = π/π_rollout, at the one update of a batch."""
    shared = {"algorithm__kl_coef": 0, "algorithm__loss": "dapo", "train__mode": "one_step_off"}
    decoupled = a_policy(
        settings,
        algorithm__old_policy="behavior",
        algorithm__mismatch="truncate",
        algorithm__mismatch_limit=1e6,
        **shared,
    )
    ratio = a_policy(
        settings, algorithm__old_policy="rollout", algorithm__clip_low=0.999, algorithm__clip_high=1e6, **shared
    )
    found = []
    for policy in (decoupled, ratio):
        policy.start_step()
        policy.accumulate([a_group()])
        found.append(gradients(policy, 4))
    assert decoupled.metrics.old_ratio_max == 1.0
    assert abs(ratio.metrics.old_ratio_max - 1) > 0.01
    assert_same(*found)


@pytest.mark.parametrize("loss", ["grpo", "m2po"])
def test_a_figure_that_is_not_finite_ends_the_step_and_names_its_prompts(settings, loss):
    """One NaN among the instance's log-probabilities, of the second of three prompts in micro-batches of their own."""
    policy = a_policy(
        settings,
        algorithm__loss=loss,
        algorithm__old_policy="rollout",
        algorithm__kl_coef=0,
        train__mode="sync",
        train__micro_batch_tokens=36,
    )
    groups = [a_group(index=index, seed=index) for index in range(3)]
    groups = [replace(group, prompt=replace(group.prompt, id=f"p{index}")) for index, group in enumerate(groups)]
    spoilt = replace(groups[1].responses[0], logprobs=(math.nan,) * 7)
    groups[1] = replace(groups[1], responses=(spoilt, *groups[1].responses[1:]))
    policy.start_step()
    policy.accumulate(groups)
    with pytest.raises(
        MetronomeError, match=r"not finite in the micro-batches of prompts \['p1'\]; the update was not"
    ):
        policy.reduce_gradients(12)
    policy.start_step()  # the next step does not remember it
    policy.accumulate(groups[:1])
    policy.reduce_gradients(4)


def test_updates_are_adamw_with_schedule_and_clipping(settings):
    """Against torch's AdamW on the same gradients:
    decay not on norms, warm-up from peak / w, norm clipped to the limit."""
    policy = a_policy(
        settings,
        train__warmup_steps=2,
        train__weight_decay=0.1,
        train__max_grad_norm=0.05,
        train__schedule="linear",
        train__steps=4,
        algorithm__kl_coef=0,
        algorithm__old_policy="behavior",
    )
    named = dict(policy.models.policy.named_parameters())
    twins = {name: torch.nn.Parameter(p.detach().clone()) for name, p in named.items()}
    groups = [
        {"params": [p for p in twins.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in twins.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    twin = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step, rate in enumerate((0.5e-3, 1e-3, 1e-3 * (1 - 1 / 3), 1e-3 * (1 - 2 / 3))):
        policy.start_step()
        policy.accumulate([a_group(seed=step)])
        for name, p in twins.items():
            p.grad = named[name].main_grad / 4
        norm = torch.nn.utils.clip_grad_norm_(list(twins.values()), 0.05)
        for group in twin.param_groups:
            group["lr"] = rate
        twin.step()
        policy.reduce_gradients(4)
        got_norm, got_rate = policy.step_optimizer()
        assert got_norm == pytest.approx(float(norm), rel=1e-4)
        assert got_norm > 0.05
        assert got_rate == pytest.approx(rate)
        for name, p in named.items():
            torch.testing.assert_close(
                p.detach(), twins[name].detach(), rtol=1e-4, atol=2e-6, msg=f"{name} step {step}"
            )


@pytest.mark.parametrize(("place", "value"), [(3, float("inf")), (-1, float("nan")), (3, 1e20), (-1, -1e17)])
def test_a_gradient_that_is_not_finite_or_absurd_changes_nothing(settings, place, value):
    """1e20 is finite, but its square is not: the update would train nothing but weight decay."""
    policy = a_policy(settings)
    before = [p.detach().clone() for p in policy.models.policy.parameters()]
    policy.start_step()
    policy.accumulate([a_group()])
    policy.ddp.buffers[0].grad_data[place] = value
    with pytest.raises(MetronomeError, match="the gradient of this step is not finite"):
        policy.reduce_gradients(4)
    for p, kept in zip(policy.models.policy.parameters(), before, strict=True):
        assert torch.equal(p, kept)


def test_adam_in_bfloat16_is_fused_and_updates_as_in_fp32(settings):
    moved = []
    for dtype in ("float32", "bfloat16"):
        policy = a_policy(settings, train__dtype=dtype, train__ratio_gap_limit=0)
        masters = [main for group in policy.optimizer.param_groups for main in group["params"]]
        before = [main.detach().clone() for main in masters]
        policy.start_step()
        for main in policy.ddp.buffers:
            main.grad_data.copy_(torch.randn(main.grad_data.shape, generator=torch.Generator().manual_seed(0)))
        policy.update(4)
        moved.append([main.detach() - old for main, old in zip(masters, before, strict=True)])
    assert {group["fused"] for group in policy.optimizer.param_groups} == {True}
    for plain, fused in zip(*moved, strict=True):
        assert fused.dtype is torch.float32
        assert (fused - plain).norm() <= 0.01 * plain.norm()


def test_truncated_responses_can_be_masked_and_over_long_ones_punished(settings):
    group = a_group()
    cut = replace(group, responses=(replace(group.responses[0], finish_reason="length"), *group.responses[1:]))
    group_advantages = a_policy(settings, algorithm__mask_truncated=True, algorithm__overlong_buffer=8).group_advantages
    assert group_advantages.weights(cut, 0).tolist() == [0.0] * 7
    assert group_advantages.weights(cut, 1).tolist() == pytest.approx([1 / 3] * 3)
    assert group_advantages.count_tokens(cut) == [0, 3, 12, 5]
    plain = torch.tensor([score.value for score in group.scores])
    assert (group_advantages.rewards(cut) - plain).tolist() == pytest.approx([0, 0, -0.5, 0])  # 12 of 16, free up to 8


def make_step(policy, group):
    """A step of one group with its update. Returns the raw gradient."""
    policy.start_step()
    policy.accumulate([group])
    policy.reduce_gradients(4)
    raw = torch.cat([buffer.grad_data.clone() for buffer in policy.ddp.buffers])
    policy.step_optimizer()
    return raw


def controlled_steps(policy, seeds):
    return [make_step(policy, a_group(seed=seed)) for seed in seeds]


def test_measuring_the_cosine_changes_nothing(settings):
    plain, measured = (a_policy(settings, algorithm__gradient_control=kind) for kind in ("none", "measure"))
    controlled_steps(plain, (1, 2, 3))
    raw = controlled_steps(measured, (1, 2, 3))
    figures = measured.figures()
    assert figures["grad_cosine"] == pytest.approx(float(torch.cosine_similarity(raw[2], raw[1], dim=0)), abs=1e-5)
    assert figures["skipped_updates"] == 0
    for one, other in zip(plain.models.policy.parameters(), measured.models.policy.parameters(), strict=True):
        assert torch.equal(one, other)
    assert "grad_cosine" not in plain.figures()


def test_the_gradient_after_a_changed_one_is_compared_with_it_as_it_was_before(settings):
    policy = a_policy(
        settings,
        algorithm__gradient_control="gac",
        algorithm__gac_low=0.001,
        algorithm__gac_high=0.99,
        train__learning_rate=1e-6,
    )
    _, second = controlled_steps(policy, (1, 2))
    turned = torch.cat([buffer.grad_data.clone() for buffer in policy.ddp.buffers])
    (third,) = controlled_steps(policy, (1,))
    cosine = partial(torch.cosine_similarity, dim=0)
    assert abs(float(cosine(third, turned) - cosine(third, second))) > 1e-3
    assert policy.figures()["grad_cosine"] == pytest.approx(float(cosine(third, second)), abs=1e-5)


def skipping_policy(settings):
    """One that skips an update whose cosine is above 0.9, at most two in a row."""
    return a_policy(
        settings,
        algorithm__gradient_control="gac",
        algorithm__gac_low=0.2,
        algorithm__gac_high=0.9,
        algorithm__gac_skips=2,
        train__learning_rate=1e-6,
    )


def test_a_violation_skips_the_update_and_the_next_is_compared_with_the_skipped_gradient(settings, capsys):
    policy = skipping_policy(settings)
    controlled_steps(policy, (1,))
    before = [p.detach().clone() for p in policy.models.policy.parameters()]
    schedule = policy.scheduler.state_dict()
    for count in (1, 2):  # the same group again: the cosine is almost 1
        (raw,) = controlled_steps(policy, (1,))
        assert policy.figures()["skipped_updates"] == count
        for p, kept in zip(policy.models.policy.parameters(), before, strict=True):
            assert torch.equal(p, kept)
    assert policy.scheduler.state_dict() == schedule
    assert "update skipped, 2 in a row" in capsys.readouterr().out
    (next_raw,) = controlled_steps(policy, (2,))
    figures = policy.figures()
    assert figures["skipped_updates"] == 0
    assert figures["grad_cosine"] == pytest.approx(float(torch.cosine_similarity(next_raw, raw, dim=0)), abs=1e-5)
    assert not all(torch.equal(p, kept) for p, kept in zip(policy.models.policy.parameters(), before, strict=True))
    assert figures["skipped_updates_of_run"] == 2


def test_a_direction_that_persists_is_skipped_no_more_often_than_the_bound_says(settings):
    """The same group every step: Algorithm 1 alone made one update of these seven. The state survives a checkpoint."""
    policy = skipping_policy(settings)
    skipped = []
    of_run = []
    for step in range(7):
        controlled_steps(policy, (1,))
        if step:
            skipped.append(policy.figures()["skipped_updates"])
            of_run.append(policy.figures()["skipped_updates_of_run"])
        if step == 2:
            state = policy.control.state()
    assert skipped == [1, 2, 0, 1, 2, 0]
    assert of_run == [1, 2, 2, 3, 4, 4]
    resumed = a_policy(settings, algorithm__gradient_control="gac").control
    resumed.load_state(state)
    assert (resumed.skipped, resumed.skipped_of_run) == (2, 2)  # so the next update is made


def test_a_zero_gradient_is_no_measurement(settings):
    """Automatic thresholds of nothing but zeros would skip the first real gradients."""
    policy = a_policy(
        settings,
        algorithm__gradient_control="gac",
        algorithm__gac_low="auto",
        algorithm__gac_high="auto",
        algorithm__kl_coef=0,
    )
    equal = replace(a_group(seed=4), scores=(Score(1.0),) * 4)
    for group, measured in ((a_group(seed=1), 0), (equal, 0), (a_group(seed=2), 0), (a_group(seed=3), 1), (equal, 1)):
        make_step(policy, group)
        assert len(policy.control.seen) == measured
        assert ("grad_cosine" in policy.figures()) == (group is not equal and measured > 0)


def test_a_tokens_mismatch_is_weighed_under_the_weights_that_sampled_it(settings):
    """A response continued under newer weights: its first three tokens are one update old, the others are not."""
    policy = a_policy(
        settings,
        train__mode="one_step_off",
        algorithm__old_policy="previous",
        algorithm__mismatch="truncate",
        algorithm__kl_coef=0,
    )
    policy.models.old.set([weight * 1.01 for weight in policy.models.old.weights])
    group = a_group((7, 4))
    found = []
    loss = policy._loss
    first = replace(group.responses[0], versions=((0, 0), (3, 1)))
    second = replace(group.responses[1], versions=((0, 1),))
    policy._loss = lambda terms, coefficients: found.append(terms) or loss(terms, coefficients)
    grpo = policy.config.algorithm.model_copy(update={"loss": "grpo"})
    policy.group_advantages = replace(policy.group_advantages, algorithm=grpo)
    policy.start_step()
    policy.accumulate([replace(group, step=1, responses=(first, second))])
    (terms,) = found
    now = terms.logprobs.detach()
    old = terms.old
    assert not torch.allclose(now, old)
    assert torch.equal(terms.sampled, torch.cat([old[:3], now[3:]]))


def test_a_users_advantage_that_fails_on_real_rewards_is_bad_input(settings, tmp_path):
    (tmp_path / "own.py").write_text("def own(rewards, lengths): return rewards / (rewards.sum() - 3)")
    spec = f"{tmp_path / 'own.py'}:own"
    certain = replace(a_group(), scores=tuple(map(Score, (1.0, 1.0, 1.0, 0.0))))
    assert advantages_with(advantage=spec).advantages(a_group()).shape == (4,)
    with pytest.raises(
        BadInput, match=r"own.py:own.*it failed on step 0, prompt p, rewards \[1.0, 1.0, 1.0, 0.0\]: ValueError"
    ):
        advantages_with(advantage=spec).advantages(certain)


ESTIMATORS = {"grpo": "rloo", "dapo": "opo", "dr_grpo": "gpg", "gspo": "dr_grpo", "cispo": "grpo_passk", "gpg": "gpg"}
"""An advantage for each loss."""


def advantages_of(name, group):
    rewards = torch.tensor([score.value for score in group.scores])
    lengths = torch.tensor([float(len(response.token_ids)) for response in group.responses])
    if name == "rloo":
        return torch.stack(
            [rewards[i] - (rewards.sum() - rewards[i]) / (len(rewards) - 1) for i in range(len(rewards))]
        )
    if name == "opo":
        return rewards - (rewards * lengths).sum() / lengths.sum()
    if name == "grpo_passk":
        order = rewards.argsort(descending=True)
        best = (rewards[order[0]] - rewards[order[1]]) / (rewards.std() + 1e-6)
        return torch.where(torch.arange(len(rewards)) == order[0], best, torch.zeros(()))
    return rewards - rewards.mean()


def gain_of(loss, logs, old, advantage):
    if loss == "gpg":
        return advantage * logs
    ratio = (logs - old).exp()
    if loss == "gspo":
        whole = (logs - old).mean().exp()
        return torch.minimum(whole * advantage, whole.clamp(0.8, 1.2) * advantage).expand(len(logs))
    if loss == "cispo":
        return ratio.detach().clamp(0.8, 1.2) * advantage * logs
    return torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def hf_step(folder, groups, loss, estimator, old_scale):
    """The step's gradient by transformers; the old policy is the model with scaled weights."""
    model, old = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    with torch.no_grad():
        for parameter in old.parameters():
            parameter.mul_(old_scale)
    gains = []
    equal = 0
    for group in groups:
        equal += len({score.value for score in group.scores}) == 1
        for advantage, member in zip(advantages_of(estimator, group), group.responses, strict=True):
            prompt = list(group.prompt.token_ids)
            ids = torch.tensor(prompt + list(member.token_ids))
            logs, before = (
                torch.log_softmax(m(ids[None]).logits[0, len(prompt) - 1 : -1], -1).gather(
                    -1, ids[len(prompt) :, None]
                )[:, 0]
                for m in (model, old)
            )
            gains.append(gain_of(loss, logs, before.detach(), advantage))
    if loss in ("grpo", "gspo"):
        total = sum(gain.mean() for gain in gains) / len(gains)
    elif loss == "dr_grpo":
        total = sum(gain.sum() for gain in gains) / (len(gains) * 16)  # 16: rollout.max_new_tokens of the settings
    else:
        total = torch.cat(gains).mean()
    if estimator == "gpg":
        total = total * len(groups) / (len(groups) - equal)
    (-total).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("budget", [4096, 30])
@pytest.mark.parametrize("loss", ESTIMATORS)
def test_a_steps_gradient_with_every_loss_equals_hugging_face(settings, tiny_model, loss, budget):
    estimator = ESTIMATORS[loss]
    policy = a_policy(
        settings,
        algorithm__loss=loss,
        algorithm__advantage=estimator,
        algorithm__kl_coef=0,
        algorithm__old_policy="previous",
        train__micro_batch_tokens=budget,
    )
    policy.models.old.set([weight * 1.01 for weight in policy.models.old.weights])
    equal = replace(a_group(index=1, seed=5, lengths=(4, 9, 2, 6)), scores=(Score(1.0),) * 4)
    groups = [a_group(), equal, a_group(index=2, seed=8, lengths=(3, 3, 8, 1))]
    policy.start_step()
    policy.accumulate(groups)
    policy.reduce_gradients(12)
    ours = gradients(policy, 1)
    assert_same(ours, hf_step(folder=tiny_model, groups=groups, loss=loss, estimator=estimator, old_scale=1.01), 2e-5)
    assert policy.figures()["equal_groups"] == 1


def test_adam_updates_one_parameter_at_a_time_on_every_device(settings):
    """torch's own choice for accelerators needs temporary tensors of the size of all fp32 weights."""
    groups = a_policy(settings).optimizer.param_groups
    assert {(group["foreach"], group["fused"]) for group in groups} == {(False, False)}
