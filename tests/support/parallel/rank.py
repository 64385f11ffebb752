"""One rank of the parallel tests: `python rank.py FOLDER` runs every case of FOLDER/cases.pickle, one after the other.

Writes FOLDER/<number>-<rank>.pt for each: whole Hugging Face gradients of this rank's stage, the log-probabilities that
this rank judges, and the step's figures. Started by harness.py; knows nothing of transformers.
"""

import json
import os
import pickle
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from megatron.core import parallel_state

sys.path[:0] = [str(Path(__file__).resolve().parents[3]), str(Path(__file__).resolve().parents[2])]

from engine import platform  # noqa: E402
from engine.algorithm.advantages import advantage  # noqa: E402
from engine.config import recipe  # noqa: E402
from engine.model import linear  # noqa: E402
from engine.model.hf_weights import export_weights  # noqa: E402
from engine.model.logprobs import token_logprobs  # noqa: E402
from engine.trainer.policy import Policy  # noqa: E402
from support.parallel.cases import CLIP, ENTROPY_COEF, KL_COEF, OLD_SCALE, REFERENCE_SCALE, Case, make_groups  # noqa: E402

SIZES = ("tensor", "pipeline", "context", "expert")


def config_of(case: Case, folder: Path):
    clipped = {"algorithm.clip_low": CLIP, "algorithm.clip_high": CLIP}
    losses = {
        "plain": {"algorithm.old_policy": "behavior"},
        "full": {
            "algorithm.old_policy": "previous",
            "algorithm.kl_coef": KL_COEF,
            "algorithm.entropy_coef": ENTROPY_COEF,
            **clipped,
        },
        "rollout": {"algorithm.old_policy": "rollout", **clipped},
    }
    settings = {
        "run.name": "parallel", "model.path": str(folder / case.model), "rollout.temperature": case.temperature,
        "attention.shared_prompt": case.shared, "train.micro_batch_tokens": case.budget,
        **{f"parallel.{key}": value for key, value in case.layout.items()},
        **losses[case.loss], **case.settings,
    }  # fmt: skip
    return recipe.load_config(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])


def open_policy(case: Case, folder: Path) -> Policy:
    policy = Policy(config_of(case, folder), platform.get_platform("cpu"))
    if min(len(group.responses) for group in make_groups(case.groups)) == 1:  # grpo has no advantage for these
        advantage("reward", least=1)(lambda rewards, lengths: rewards)
        rewards = policy.config.algorithm.model_copy(update={"advantage": "reward"})
        policy.group_advantages = replace(policy.group_advantages, algorithm=rewards)
    for frozen, scale in ((policy.models.old, OLD_SCALE), (policy.models.reference, REFERENCE_SCALE)):
        if frozen is not None:
            frozen.set([weight * scale for weight in frozen.weights])
    return policy


def run(case: Case, folder: Path) -> dict:
    """What this rank found."""
    if case.kind == "logprobs":
        return {"errors": slice_errors()}
    if not case.block:
        return step(case, folder)
    with (
        patch.object(linear, "LARGE", 1),
        patch.object(linear, "BLOCK", case.block),
        patch.object(linear, "_by_onednn", side_effect=linear._by_onednn) as products,
    ):
        return step(case, folder) | {"onednn": products.call_count}


def slice_errors() -> dict[str, float]:
    """Largest errors of token_logprobs on this rank's slice of the weight, against torch in fp64 on all of it."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    errors = {}
    for tokens, vocabulary in ((13, 20), (13, 17), (13, 10), (13, 3), (1, 19), (0, 17)):  # of 20 columns
        for temperature, chunk in ((1.0, None), (1.0, 4), (0.7, 4), (0.7, 13)):
            draw = torch.Generator().manual_seed(vocabulary)
            hidden, whole = (torch.randn(rows, 9, generator=draw, dtype=torch.float64) for rows in (tokens, 20))
            targets = torch.randint(vocabulary, (tokens,), generator=draw)
            of = torch.randn(2, tokens, generator=draw)
            theirs_in = [one.clone().requires_grad_() for one in (hidden, whole)]
            ours_in = [one.float().requires_grad_() for one in (hidden, whole.chunk(size)[rank])]
            ours = token_logprobs(*ours_in, targets, temperature, vocabulary=vocabulary, chunk=chunk)
            logs = torch.log_softmax((theirs_in[0] @ theirs_in[1].t())[:, :vocabulary] / temperature, -1)
            theirs = logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
            for outputs in (ours, theirs):
                sum((out * weight).sum() for out, weight in zip(outputs, of, strict=True)).backward()
            found = (*ours, *(one.grad for one in ours_in))
            wanted = (*theirs, theirs_in[0].grad, theirs_in[1].grad.chunk(size)[rank])
            gaps = [(a.detach() - b.detach()).abs().flatten() for a, b in zip(found, wanted, strict=True)]
            name = f"{tokens} tokens, vocabulary {vocabulary}, temperature {temperature}, chunk {chunk}"
            errors[name] = float(torch.cat([torch.zeros(1), *gaps]).max())
    return errors


def step(case: Case, folder: Path) -> dict:
    """One step of training."""
    policy = open_policy(case, folder)
    groups = make_groups(case.groups, case.routed)
    found = []
    look_up = policy._old_logprobs

    def overhear(batch, logprobs, old):
        found_old = look_up(batch, logprobs, old)
        if policy.ranks.judges and logprobs.requires_grad:  # not those of a held window's forward-only pass
            found.append(
                (
                    [(group.index, n, len(group.responses[n].token_ids)) for group, n in batch.members],
                    batch.layout.kept,
                    logprobs.detach().clone(),
                    found_old.clone(),
                )
            )
        return found_old

    if case.before:
        policy.start_step()
        before = make_groups(case.before)
        for window in (
            [group] for group in before if group.index % policy.ranks.replica_groups == policy.ranks.replica_group
        ):
            policy.accumulate(window)
        policy.reduce_gradients(sum(len(group.responses) for group in before))
        policy.step_optimizer()
    policy._old_logprobs = overhear
    policy.start_step()
    for window in case.windows(policy.ranks.replica_group, policy.ranks.replica_groups):
        policy.accumulate([groups[index] for index in window])
    policy.reduce_gradients(sum(len(group.responses) for group in groups))
    models = policy.models
    grads = {name: p.main_grad for name, p in models.policy.named_parameters()}
    whole = {name: tensor.clone() for name, tensor in export_weights(grads, models.policy, models.shape)}
    norm, _ = policy.step_optimizer()
    turned = (
        {name: tensor.clone() for name, tensor in export_weights(grads, models.policy, models.shape)}
        if policy.control
        else {}
    )
    figures = policy.figures()
    weights = {name: tensor.clone() for name, tensor in models.export()}
    return {
        "stage": policy.ranks.stage,
        "gradients": whole,
        "logprobs": found,
        "figures": figures,
        "norm": norm,
        "turned": turned,
        "weights": weights,
    }


def main():
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    rank = os.environ["RANK"]
    cases, ports = pickle.loads((folder / "cases.pickle").read_bytes())
    with ExitStack() as stack:
        layout = None
        for number, case in enumerate(cases):
            print(f"case {case.name}", flush=True)
            if case.layout != layout:
                stack.close()
                os.environ["MASTER_PORT"] = str(ports.pop(0))
                sizes = {name: int(case.layout.get(name, 1)) for name in SIZES}
                stack.enter_context(platform.parallel_session(platform.get_platform("cpu"), 0, timeout_s=60.0, **sizes))
                layout = case.layout
            torch.save(run(case, folder), folder / f"unfinished-{rank}")
            (folder / f"unfinished-{rank}").rename(folder / f"{number}-{rank}.pt")


if __name__ == "__main__":
    main()
