"""A step's gradient with every loss against Hugging Face and plain autograd: one process, real Megatron."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.types import Score
from support.policies import a_group, a_policy, assert_same, gradients

pytestmark = pytest.mark.usefixtures("megatron")


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
