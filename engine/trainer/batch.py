"""From a window's groups to micro-batches: a pure function of them, so that asynchrony can't change it (contract 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True)
class Part:
    """Some responses of one group, with their advantages."""

    prompt: tuple[int, ...]
    responses: tuple[Response, ...]
    advantages: Tensor
    size: int
    """Tokens computed."""


def micro_batches(window: Sequence[Group], advantage: str, budget: int, shared_prompt: bool) -> Iterator[MicroBatch]:
    """Pack groups into micro-batches of at most `budget` tokens; a group above it is split, its prompt computed again.

    Advantages are over the whole group, whatever the split.
    """
    packed: list[Part] = []
    for part in (part for group in window for part in _parts(group, advantage, budget, shared_prompt)):
        if packed and sum(other.size for other in packed) + part.size > budget:
            yield _micro_batch(packed, shared_prompt)
            packed = []
        packed.append(part)
    yield _micro_batch(packed, shared_prompt)


def _parts(group: Group, advantage: str, budget: int, shared_prompt: bool) -> Iterator[Part]:
    rewards = torch.tensor([score.value for score in group.scores], dtype=torch.float32)
    advantages = ADVANTAGES[advantage](rewards)
    prompt = group.prompt.token_ids
    lengths = [len(response.token_ids) for response in group.responses]
    for indices in split(len(prompt), lengths, budget, shared_prompt):
        size = sum(lengths[i] for i in indices) + len(prompt) * (1 if shared_prompt else len(indices))
        yield Part(prompt, tuple(group.responses[i] for i in indices), advantages[indices], size)


def _micro_batch(parts: Sequence[Part], shared_prompt: bool) -> MicroBatch:
    responses = [response for part in parts for response in part.responses]
    lengths = torch.tensor([len(response.token_ids) for response in responses])
    return MicroBatch(
        layout=layout([(part.prompt, [r.token_ids for r in part.responses]) for part in parts], shared_prompt),
        rollout=torch.tensor([value for response in responses for value in response.logprobs]),
        advantages=torch.repeat_interleave(torch.cat([part.advantages for part in parts]), lengths),
        weights=torch.cat([_weights(response) for response in responses]),
    )


def _weights(response: Response) -> Tensor:
    mask = torch.tensor(response.loss_mask, dtype=torch.float32)
    return mask / mask.sum().clamp(min=1.0)


def trained_tokens(group: Group) -> int:
    """Prompt and response tokens of every response, whatever was computed: the papers' unit of throughput."""
    return sum(len(group.prompt.token_ids) + len(response.token_ids) for response in group.responses)
