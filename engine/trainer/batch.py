"""From groups to micro-batches: a pure function of the group, so that asynchrony can't change it (contract 2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.algorithm.advantages import ADVANTAGES
from engine.model.layout import Layout, layout, split
from engine.types import Group, Response


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward; per-token tensors are [T] over the scored response tokens."""

    layout: Layout
    rollout: Tensor
    """The instance's log-probabilities."""
    advantages: Tensor
    weights: Tensor
    """mask / |o_i|, |o_i| the trained tokens of response i."""


def micro_batches(group: Group, advantage: str, budget: int, shared_prompt: bool) -> Iterator[MicroBatch]:
    """Split a group by the token budget; advantages are over the whole group, whatever the split."""
    rewards = torch.tensor([score.value for score in group.scores], dtype=torch.float32)
    advantages = ADVANTAGES[advantage](rewards)
    lengths = [len(response.token_ids) for response in group.responses]
    for indices in split(len(group.prompt.token_ids), lengths, budget, shared_prompt):
        responses = [group.responses[i] for i in indices]
        ids = [response.token_ids for response in responses]
        yield MicroBatch(
            layout=layout([(group.prompt.token_ids, ids)], shared_prompt),
            rollout=torch.tensor([value for response in responses for value in response.logprobs]),
            advantages=torch.repeat_interleave(advantages[indices], torch.tensor([lengths[i] for i in indices])),
            weights=torch.cat([_weights(response) for response in responses]),
        )


def _weights(response: Response) -> Tensor:
    mask = torch.tensor(response.loss_mask, dtype=torch.float32)
    return mask / mask.sum().clamp(min=1.0)


def trained_tokens(group: Group) -> int:
    """Prompt and response tokens of every response, whatever was computed: the papers' unit of throughput."""
    return sum(len(group.prompt.token_ids) + len(response.token_ids) for response in group.responses)
