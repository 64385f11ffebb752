"""A step's batch, and its generation: its prompts go to the producer, its groups come into the sample queue."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from statistics import fmean

from engine.config import BATCH_SCOPE, Config
from engine.data.loader import PromptLoader
from engine.errors import BadInput
from engine.launcher.dynamic_sampling import DynamicSampling
from engine.launcher.rollout_service import RolloutService
from engine.launcher.sample_queue import SampleQueue
from engine.run.folder import SAMPLED_GROUPS
from engine.types import BatchScores, Group, Landed


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
        return Batch(
            SampleQueue(
                step=step,
                expected=train.prompts_per_step,
                order=train.consume,
                hold=train.mode == "sync",
                units=config.parallel.units,
            )
        )

    @property
    def generated(self) -> bool:
        """Whether every group is in."""
        return self.queue.arrived == self.queue.expected

    def put(self, group: Group, config: Config) -> None:
        """Into the queue; where advantages depend on the whole batch only once all of it is there,
        with the batch's scores."""
        if config.algorithm.advantage not in BATCH_SCOPE:
            self.queue.put(group)
            return
        self.held.append(group)
        if len(self.held) == self.queue.expected:
            scores = BatchScores.of(self.held)
            for held in self.held:
                self.queue.put(replace(held, batch=scores))


class BatchGenerator:
    """Fills batches. With dynamic sampling a batch begins behind the last prompt that the one before it used."""

    def __init__(
        self, config: Config, loader: PromptLoader, service: RolloutService, notify: Callable[[], Awaitable[None]]
    ) -> None:
        """`notify` is called whenever there is something new to lease."""
        self._config = config
        self._loader = loader
        self._service = service
        self._notify = notify
        self._position = 0
        self._before: Batch | None = None

    @property
    def _scores_early(self) -> bool:
        algorithm = self._config.algorithm
        train = self._config.train
        return (
            train.score_early and train.mode != "sync" and (algorithm.old_policy == "previous" or algorithm.kl_coef > 0)
        )

    @property
    def fingerprint(self) -> str:
        """Of the run's prompts in their order."""
        return self._loader.fingerprint

    def resume_at(self, step: int, position: int | None, prompts: str | None = None) -> None:
        """The trainer begins with `step`; `position`: prompts used before it, `prompts`: their fingerprint, of its
        checkpoint.

        Raises BadInput where dynamic sampling has to know the position, and does not; and for a checkpoint of other
        prompts.
        """
        if prompts not in (None, self.fingerprint):
            raise BadInput(
                "--resume: the prompts of this run, or their order, are not those that its checkpoint was trained on. "
                "They are decided by the content of data.train and data.heldout, by the benchmarks that data.train is "
                "compared with (evaluate.benchmark, evaluate.folder), by reward.function and rollout.max_context: "
                "resume with these as they were, or begin a new run from the trained policy"
            )
        if self._config.algorithm.dynamic_sampling and step and position is None:
            raise BadInput(
                f"--resume: the checkpoint before step {step} says nothing of the prompts that were used, which "
                "algorithm.dynamic_sampling has to know (it was taken by a replay); resume from another one"
            )
        self._position = position or 0
        self._before = None

    def begin(self, step: int) -> tuple[Batch, Batch | None]:
        """A step's batch, and the one that must be generated before it, if any. Steps are begun in order."""
        batch = Batch.of(self._config, step)
        before = None
        if self._config.algorithm.dynamic_sampling:
            before = self._before
            self._before = batch
        return batch, before

    async def fill(self, step: int, batch: Batch, before: Batch | None) -> None:
        """Generate it, once `before` is. Raises MetronomeError."""
        if before is not None and before.task is not None:
            await asyncio.wait([before.task])
            if before.next_position is None:
                return  # it failed, and the run with it
            self._position = before.next_position
        started = time.perf_counter()

        async def put(group: Group) -> None:
            batch.put(group, self._config)
            if len(batch.samples) < SAMPLED_GROUPS:
                batch.samples.append(group)
            batch.rollout_s = time.perf_counter() - started
            await self._notify()

        if self._config.algorithm.dynamic_sampling:
            await self._generate_selected(step, batch, put)
        else:
            await self._generate_all(step, batch, put)

    async def _generate_all(self, step: int, batch: Batch, put: Callable[[Group], Awaitable[None]]) -> None:
        """The step's own prompts, all of them."""

        async def land(landed: Landed) -> None:
            batch.queue.land(landed)
            await self._notify()

        prompts = [(self._loader.epoch_of(step, i), prompt) for i, prompt in enumerate(self._loader.batch(step))]
        await self._service.producer.run(step, prompts, put, land if self._scores_early else None)

    async def _generate_selected(self, step: int, batch: Batch, put: Callable[[Group], Awaitable[None]]) -> None:
        """As many of the next prompts as it takes to find enough groups that teach something."""
        wanted = self._config.train.prompts_per_step
        position = self._position
        selection = DynamicSampling(wanted, wanted * self._config.algorithm.dynamic_sampling_batches, step)

        rewards: dict[int, float] = {}

        async def decide(group: Group) -> None:
            due = selection.decide(group)
            rewards[group.index] = fmean(score.value for score in group.scores)
            if due and selection.used is not None:
                batch.reward_tried = fmean(rewards[number] for number in range(selection.used))
                batch.prompts_used = selection.used
                batch.next_position = position + selection.used
            for one in due:
                await put(one)

        prompts = map(self._loader.at, itertools.count(position))
        await self._service.producer.run_until(step, prompts, decide, selection)
