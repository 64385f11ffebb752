"""Policies with their checkpoints, trained, saved and compared."""

import torch

from engine import platform
from engine.run import checkpoint_files as files
from engine.run.run_file import update_run
from support.policies import a_group
from support.runs import config_of

CPU = platform.get_platform("cpu")


def builder(settings, folder):
    """Makes a (policy, checkpoints) pair of the same root folder, with changed settings (`train__dtype="bfloat16"`)."""
    from engine.trainer.checkpoint.checkpoints import Checkpoints
    from engine.trainer.policy import Policy

    def built(weights="hash", root=folder / "checkpoints", policy=None, **changes):
        changed = {key.replace("__", "."): value for key, value in changes.items()}
        config = config_of(settings | {"train.ratio_gap_limit": 0} | changed)
        policy = policy or Policy(config, CPU)
        update_run(root.parent, inputs={"weights": {"named": "", "hash": weights, "path": ""}})
        return policy, Checkpoints(root, policy, config)

    return built


def train(policy, seed):
    policy.start_step()
    policy.accumulate([a_group(seed=seed)])
    policy.reduce_gradients(4)
    policy.models.copy_policy_to_old()
    return policy.step_optimizer()


def save(checkpoints, step, **figures):
    checkpoints.save(step, figures)
    checkpoints.finish(30)
    return files.folder_of(checkpoints._root, step)


def assert_same(policy, other):
    for (name, ours), theirs in zip(
        policy.models.policy.named_parameters(), other.models.policy.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    for ours, theirs in zip(policy.models.old.weights, other.models.old.weights, strict=True):
        assert torch.equal(ours, theirs)
