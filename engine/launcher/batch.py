"""One step's prompts on their way through the instances into the sample queue."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from engine.config import BATCH_SCOPE, Config
from engine.launcher.store import SampleQueue
from engine.types import BatchScores, Group


@dataclass
class Batch:
    """What the launcher keeps of a step that was started."""

    queue: SampleQueue
    samples: list[Group] = field(default_factory=list)
    """Its first groups, for people to read."""
    held: list[Group] = field(default_factory=list)
    """Groups that wait for the others, where advantages depend on all of them."""
    prompts_used: int | None = None
    """With dynamic sampling, once it is known: prompts up to the last one that was kept."""
    reward_tried: float | None = None
    """Then also: the mean score of the responses to these prompts."""
    next_position: int | None = None
    """Then also: where in the order of prompts the next batch begins."""
    rollout_s: float = 0.0
    """From its start to its last group."""
    task: asyncio.Task[None] | None = None
    """Generates it."""

    @staticmethod
    def of(config: Config, step: int) -> Batch:
        """An empty one."""
        train = config.train
        return Batch(SampleQueue(step, train.prompts_per_step, train.consume, train.mode == "sync", config.parallel.units))

    @property
    def generated(self) -> bool:
        """Whether every group is in."""
        return self.queue.arrived == self.queue.expected

    def put(self, group: Group, config: Config) -> None:
        """Into the queue; where advantages depend on the whole batch only once all of it is there, with the batch's scores."""
        if config.algorithm.advantage not in BATCH_SCOPE:
            self.queue.put(group)
            return
        self.held.append(group)
        if len(self.held) == self.queue.expected:
            scores = BatchScores.of(self.held)
            for held in self.held:
                self.queue.put(replace(held, batch=scores))
