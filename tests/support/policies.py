"""Groups of drawn tokens and policies of real Megatron, for the trainer's tests."""

import random

import torch

from engine import platform
from engine.config import Algorithm
from engine.trainer.group_advantages import GroupAdvantages
from engine.types import Group, Prompt, Response, Score
from support.runs import config_of


def response(ids, logprobs=None, mask=None):
    ids = tuple(ids)
    return Response(
        token_ids=ids,
        logprobs=tuple(logprobs or [-5.0] * len(ids)),
        versions=((0, 0),),
        loss_mask=tuple(mask or [True] * len(ids)),
        finish_reason="stop",
        text="",
        seed=0,
        instance="i",
    )


def advantages_with(longest=1, **keys):
    """How advantages are computed with these keys of [algorithm]."""
    return GroupAdvantages(Algorithm(**keys), longest)


def a_group(lengths=(7, 3, 12, 5), index=0, seed=0, prompt=9):
    draw = random.Random(seed)
    ids = [[draw.randrange(256) for _ in range(length)] for length in lengths]
    question = Prompt("p", "", "", tuple(draw.randrange(256) for _ in range(prompt)))
    scores = [Score(draw.random()) for _ in lengths]
    return Group(step=0, index=index, prompt=question, responses=tuple(map(response, ids)), scores=tuple(scores))


def a_policy(settings, **changes):
    from engine.trainer.policy import Policy

    config = config_of(settings | {key.replace("__", "."): value for key, value in changes.items()})
    return Policy(config, platform.get_platform("cpu"))


def step_gradients(settings, folder, **changes):
    """The gradients of a step of two groups, by the parameters' names in Megatron. `folder`: the model's."""
    policy = a_policy(settings, model__path=folder, **changes)
    policy.start_step()
    for seed in (1, 2):
        policy.accumulate([a_group((4, 0, 16, 1), seed=seed)])
    return {name: one.main_grad.clone() for name, one in policy.models.policy.named_parameters()}


def assert_same(ours, theirs, tolerance=1e-5):
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert torch.norm(ours[name] - grad) <= tolerance * torch.norm(grad), name


def gradients(policy, denominator):
    from engine.model.hf_weights import export_weights

    policy.ddp.scale_gradients(1 / denominator)
    grads = {name: p.main_grad.clone() for name, p in policy.models.policy.named_parameters()}
    return dict(export_weights(grads, policy.models.policy, policy.models.shape))
