"""The same steps by transformers: every response on its own, the loss written down once more."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from support.parallel.cases import CLIP, ENTROPY_COEF, KL_COEF, OLD_SCALE, REFERENCE_SCALE, make_groups


@dataclass
class Expected:
    """Of one step of N·G responses."""

    gradients: dict[str, torch.Tensor]
    logprobs: dict[tuple[int, int], torch.Tensor]
    """By group and response."""
    old: dict[tuple[int, int], torch.Tensor]
    loss: float
    scale: float
    """Mean size of the terms that the loss is a sum of; they may cancel."""
    kl: float
    entropy: float
    clipped: float

    @property
    def norm(self) -> float:
        """Of the whole gradient."""
        return float(torch.stack([grad.double().norm() for grad in self.gradients.values()]).norm())


def expect(folder: Path, groups: str, temperature: float, loss: str) -> Expected:
    """One step of a folder's model on a set of groups."""
    model, old, reference = (_scaled(folder, scale) for scale in (1.0, OLD_SCALE, REFERENCE_SCALE))
    rows = [
        (group.index, number, group.prompt.token_ids, response, advantage)
        for group in make_groups(groups)
        for number, (response, advantage) in enumerate(zip(group.responses, _advantages(group), strict=True))
    ]
    found = Expected(gradients={}, logprobs={}, old={}, loss=0.0, scale=0.0, kl=0.0, entropy=0.0, clipped=0.0)
    total = torch.zeros(())
    # the loss is a mean over all responses, the figures are means over those with a trained token
    trained = sum(any(response.loss_mask) for *_, response, _ in rows)
    for index, number, prompt, response, advantage in rows:
        mask = torch.tensor(response.loss_mask, dtype=torch.float32)
        weights = mask / mask.sum().clamp(min=1) / len(rows)
        shown = weights * len(rows) / trained
        logs, entropy = _score(model, prompt, response.token_ids, temperature)
        before = logs.detach()
        base = logs.detach()
        if loss == "full":
            with torch.no_grad():
                before, base = (_score(other, prompt, response.token_ids, temperature)[0] for other in (old, reference))
        elif loss == "rollout":
            before = torch.tensor(response.logprobs)
        ratio = (logs - before).exp()
        bounded = ratio.clamp(1 - CLIP, 1 + CLIP) * advantage
        kl = (base - logs).exp() - (base - logs) - 1
        terms = -torch.minimum(ratio * advantage, bounded)
        if loss == "full":
            terms = terms + KL_COEF * kl - ENTROPY_COEF * entropy
        total = total + (terms * weights).sum()
        found.logprobs[index, number] = logs.detach()
        found.old[index, number] = before
        found.scale += float((terms.abs() * weights).sum().detach())
        found.kl += float((kl * shown).sum().detach())
        found.entropy += float((entropy * shown).sum().detach())
        found.clipped += float(((bounded < ratio * advantage) * shown).sum().detach())
    total.backward()
    found.loss = float(total.detach())
    found.gradients = dict(_named(model))
    return found


def _scaled(folder: Path, scale: float) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def _advantages(group) -> torch.Tensor:
    rewards = torch.tensor([score.value for score in group.scores])
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6) if len(rewards) > 1 else rewards


def _score(model, prompt, response, temperature):
    """([T] log-probabilities, [T] entropies) of a response, by a forward of its own."""
    if not response:
        return torch.zeros(0), torch.zeros(0)
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    logs = torch.log_softmax(logits / temperature, -1)
    return logs.gather(1, torch.tensor(response)[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def _named(model):
    """Gradients by the names that a saved model has; in memory transformers keeps a layer's experts in one tensor."""
    for name, parameter in model.named_parameters():
        path, _, last = name.rpartition(".experts.")
        if not path:
            yield name, parameter.grad
            continue
        for number, grad in enumerate(parameter.grad):
            parts = (
                zip(("gate_proj", "up_proj"), grad.chunk(2), strict=True) if last == "gate_up_proj" else [(last, grad)]
            )
            yield from ((f"{path}.experts.{number}.{part}.weight", tensor) for part, tensor in parts)
