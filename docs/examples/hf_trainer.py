"""A trainer of one process in plain Hugging Face and torch: GRPO by periodic asynchrony, on one page.

python docs/examples/hf_trainer.py RUN_FOLDER|HOST:PORT --out FOLDER

It trains the recipe of a running `metronome service` with GRPO and AdamW, and saves the policy (a Hugging Face folder).
"""

import argparse
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.client.service import ServiceClient
from engine.config import Config
from engine.errors import BadInput
from engine.trainer.loop import Loop, Trainer
from engine.trainer.rollouts import LiveRollouts
from engine.types import Group

SUPPORTED = {"advantage": "grpo", "loss": "grpo", "old_policy": "previous", "gradient_control": "none"}


class HuggingFaceTrainer(Trainer):
    """GRPO with a clipped surrogate and a k3 KL term, as of Periodic Asynchrony eq. 4-9."""

    def __init__(self, config: Config) -> None:
        algorithm = config.algorithm
        if wrong := [f"algorithm.{key}" for key, value in SUPPORTED.items() if getattr(algorithm, key) != value]:
            raise BadInput(f"this example does not have {', '.join(wrong)} as they are in the recipe")
        if config.train.updates > 1 or config.train.warmup_steps or config.train.schedule != "constant":
            raise BadInput("this example has one update a step and a constant learning rate")
        self.config = config
        self.policy = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).train()
        self.old = copy.deepcopy(self.policy).requires_grad_(False)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        matrices = [one for one in self.policy.parameters() if one.ndim > 1]
        others = [one for one in self.policy.parameters() if one.ndim <= 1]  # norms and biases do not decay
        decay = config.train.weight_decay
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.train.learning_rate,
            betas=config.train.betas,
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The policy under Hugging Face names; tied tensors come once."""
        return ((name, parameter.detach()) for name, parameter in self.policy.named_parameters())

    @torch.no_grad()
    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of the tokens after the first, at temperature 1."""
        row = torch.tensor([list(token_ids)])
        found = self.policy(row).logits[:, :-1].log_softmax(-1).gather(2, row[:, 1:, None])
        return found.flatten().tolist()

    def accumulate(self, window: Sequence[Group]) -> None:
        """Add the gradient of the groups' summed loss."""
        for group in window:
            rewards = torch.tensor([score.value for score in group.scores])
            centred = rewards - rewards.mean() if bool((rewards != rewards[0]).any()) else torch.zeros_like(rewards)
            self._loss(group, centred / (rewards.std() + 1e-6)).backward()

    def _loss(self, group: Group, advantages: Tensor) -> Tensor:
        algorithm = self.config.algorithm
        mask = _rows([response.loss_mask for response in group.responses]).float()
        logprobs = self._logprobs(self.policy, group)
        with torch.no_grad():
            old = self._logprobs(self.old, group)
            reference = self._logprobs(self.reference, group)
        ratio = (logprobs - old).exp()
        gain = ratio * advantages[:, None]
        clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) * advantages[:, None]
        apart = reference - logprobs
        kl = torch.expm1(apart) - apart
        objective = torch.minimum(gain, clipped) - algorithm.kl_coef * kl
        return -(objective * mask).sum(1).div(mask.sum(1).clamp(min=1)).sum()

    def _logprobs(self, model: torch.nn.Module, group: Group) -> Tensor:
        """[G, longest] log-probabilities of the responses' tokens at the recipe's temperature; 0 after their ends."""
        prompt = group.prompt.token_ids
        tokens = _rows([prompt + response.token_ids for response in group.responses])
        targets = tokens[:, len(prompt) :]
        logits = model(tokens).logits[:, len(prompt) - 1 : -1] / self.config.rollout.temperature
        inside = _rows([[1] * len(response.token_ids) for response in group.responses])
        return logits.log_softmax(-1).gather(2, targets[..., None])[..., 0] * inside

    def update(self, responses: int) -> Mapping[str, float]:
        """One step of AdamW; the old policy is the one before it."""
        for parameter in self.policy.parameters():
            assert parameter.grad is not None
            parameter.grad /= responses
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.train.max_grad_norm)
        self.old.load_state_dict(self.policy.state_dict())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"grad_norm": float(norm)}


def _rows(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of unequal lengths as one tensor, filled up with 0 on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(list(row)) for row in rows], batch_first=True)


def main() -> None:
    """Train the recipe of a running service, and save the policy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("service", help="run folder or host:port of `metronome service`")
    parser.add_argument("--out", type=Path, required=True, help="folder for steps.jsonl and policy/")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with ServiceClient.init_engines(arguments.service) as service, open(arguments.out / "steps.jsonl", "w") as steps:
        torch.set_num_threads(service.config.trainer_threads)
        trainer = HuggingFaceTrainer(service.config)

        def report(step: int, figures: Mapping[str, object]) -> None:
            print(f"step {step}: reward {figures['reward_mean']:.4f}", flush=True)
            steps.write(json.dumps({"step": step, **figures}) + "\n")
            steps.flush()

        Loop(service.config, trainer, LiveRollouts.of(service), report).run()
        trainer.policy.save_pretrained(arguments.out / "policy")
        AutoTokenizer.from_pretrained(service.config.model.path).save_pretrained(arguments.out / "policy")


if __name__ == "__main__":
    main()
