"""What a trainer of any kind offers to be trained through the service, and the loop around it (AsyncFlow §5.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Protocol

from torch import Tensor

from engine.client.experience_dataset import leases
from engine.client.service import ServiceClient
from engine.schedule import Schedule
from engine.types import Group


class TrainerAdapter(Protocol):
    """A trainer of one model. `engine.trainer.service_adapter` is Megatron's; docs/examples has one of plain torch."""

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the policy's tensors under Hugging Face names, valid until the parameters change."""

    def probe(self, token_ids: list[int]) -> list[float]:
        """Return the log-probabilities (temperature 1) under the policy of the tokens after the first."""

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Add the groups' gradient; no optimizer step."""

    def update(self, responses: int) -> Mapping[str, float]:
        """Make the step's update, with the gradient divided for `responses` responses; return figures to report."""


def train(
    service: ServiceClient,
    trainer: TrainerAdapter,
    start: int = 0,
    pushed: bool = False,
    report: Callable[[Mapping[str, Any]], None] = print,
) -> None:
    """Train steps `start` … train.steps − 1 of the service's recipe: Algorithm 1 of Periodic Asynchrony from outside.

    `pushed`: the groups come from a program that puts them, and not from the recipe's prompts. `report` is called after
    each step. Every group is trained once, and its weight versions are checked here again. The trained policy has
    version train.steps, which is not published. Raises StaleRolloutError, and what `ServiceClient` raises.
    """
    config = service.config
    schedule = Schedule.of(config.train, config.rollout.partial)
    for step in range(start, config.train.steps):
        service.weight_sync_notify(step, trainer)
        for batch in schedule.due(step, start, config.train.steps) if not pushed else ():
            service.put_prompts_data(batch)
        trained: list[Group] = []
        for lease in leases(service, step, "trainer"):
            for group in lease.groups:
                schedule.check(group)
            trainer.accumulate(lease.groups)
            trained += lease.groups
        figures = trainer.update(config.train.prompts_per_step * config.rollout.group_size)
        rewards = [score.value for group in trained for score in group.scores]
        versions = {version for group in trained for one in group.responses for _, version in one.versions}
        report(
            {
                "step": step,
                "reward_mean": fmean(rewards),
                "groups": [group.index for group in trained],
                "versions_seen": sorted(versions),
                **figures,
            }
        )
