"""Makes the batch of a step and has its responses sampled: the prompts go to the producer, and each finished group
(a prompt with all its responses) goes into the sample queue."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from engine.config import BATCH_SCOPE, Config
from engine.data.loader import PromptLoader
from engine.errors import BadInput
from engine.launcher.dynamic_sampling import DynamicSampling
from engine.launcher.rollout_service import RolloutService
from engine.launcher.sample_queue import SampleQueue
from engine.run.folder import SAMPLED_GROUPS
from engine.types import Prompt
from engine.wire.codec import PackedLanded
from engine.wire.sealed import SealedGroup, batch_scores


@dataclass
class Batch:
    """The launcher's state of one step, from its start to its report."""

    queue: SampleQueue
    samples: list[SealedGroup] = field(default_factory=list)
    """The first groups, written to the run folder for people to read."""
    held: list[SealedGroup] = field(default_factory=list)
    """Groups held back until all are there, because the advantage depends on the whole batch."""
    prompts_used: int | None = None
    """Number of prompts up to and with the last kept one; None without dynamic sampling, or while it is unknown."""
    reward_tried: float | None = None
    """Mean score of the responses to the `prompts_used` prompts; None as above."""
    next_position: int | None = None
    """Position in the order of prompts at which the next batch begins; None as above."""
    rollout_s: float = 0.0
    """Seconds from the start of the generation to the last group that has come in."""
    task: asyncio.Task[None] | None = None
    """The task that generates the batch; None before it is started, and where groups come from outside."""

    @staticmethod
    def of(config: Config, step: int) -> Batch:
        """Return the empty batch of a step."""
        train = config.train
        return Batch(
            SampleQueue(
                step=step,
                expected=train.prompts_per_step,
                order=train.consume,
                hold=train.mode == "sync",
                units=config.parallel.units,
                updates=train.updates,
                least=config.least_window_tokens,
                bubble=config.bubble_tokens,
            )
        )

    @property
    def generated(self) -> bool:
        """Whether every group has come in."""
        return self.queue.arrived == self.queue.expected

    def put(self, group: SealedGroup, config: Config) -> None:
        """Put a finished group into the queue.

        If the advantage depends on the whole batch, the groups are held back until all are there; the queue then has
        the scores of the whole batch, too.
        """
        if config.algorithm.advantage not in BATCH_SCOPE:
            self.queue.put(group)
            return
        self.held.append(group)
        if len(self.held) == self.queue.expected:
            self.queue.batch = batch_scores(self.held)
            for held in self.held:
                self.queue.put(held)
            self.held = []


class BatchGenerator:
    """Generates batches. With dynamic sampling a batch begins after the last prompt that the previous batch used."""

    def __init__(
        self, config: Config, loader: PromptLoader, service: RolloutService, notify: Callable[[], Awaitable[None]]
    ) -> None:
        """`notify` is called whenever there is something new to lease."""
        self.keep: Callable[[SealedGroup], Awaitable[SealedGroup]] | None = None
        """Called with each finished group; its result goes into the queue."""
        self._config = config
        self._loader = loader
        self._service = service
        self._notify = notify
        self._position = 0
        self._previous: Batch | None = None

    @property
    def _scores_early(self) -> bool:
        """Whether responses are offered to the trainer for scoring before their group is complete."""
        algorithm = self._config.algorithm
        train = self._config.train
        return (
            train.score_early and train.mode != "sync" and (algorithm.old_policy == "previous" or algorithm.kl_coef > 0)
        )

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the run's prompts, in their order."""
        return self._loader.fingerprint

    def resume_at(self, step: int, position: int | None, prompts: str | None = None) -> None:
        """Begin with `step`. The trainer's checkpoint gives the other two: `position` is the number of prompts used
        before `step`, `prompts` the fingerprint of the run's prompts.

        Raises BadInput if the checkpoint was trained on other prompts, or if dynamic sampling needs the position and
        the checkpoint does not have it.
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
                f"--resume: the checkpoint before step {step} does not say how many prompts were used, which "
                "algorithm.dynamic_sampling needs (a replay wrote it); resume from another checkpoint"
            )
        self._position = position or 0
        self._previous = None

    def begin(self, step: int) -> tuple[Batch, Batch | None]:
        """Return a new batch for `step`, and the batch that must be generated first, if any. Steps begin in order."""
        batch = Batch.of(self._config, step)
        before = None
        if self._config.algorithm.dynamic_sampling:
            before = self._previous
            self._previous = batch
        return batch, before

    async def fill(
        self,
        step: int,
        batch: Batch,
        before: Batch | None = None,
        prompts: Sequence[tuple[int, Prompt]] | None = None,
    ) -> None:
        """Generate `batch` once `before` is generated. Raises MetronomeError if the generation fails.

        `prompts`: (epoch, prompt) of each group; None: the next ones of the data.
        """
        if before is not None and before.task is not None:
            await asyncio.wait([before.task])
            if before.next_position is None:
                return  # the batch before failed, and with it the run
            self._position = before.next_position
        started = time.perf_counter()

        async def put(group: SealedGroup) -> None:
            if len(batch.samples) < SAMPLED_GROUPS:
                batch.samples.append(group)
            batch.put(group if self.keep is None else await self.keep(group), self._config)
            batch.rollout_s = time.perf_counter() - started
            await self._notify()

        if self._config.algorithm.dynamic_sampling:
            await self._generate_selected(step, batch, put)
        else:
            await self._generate_all(step, batch, put, prompts or self._prompts(step))

    def _prompts(self, step: int) -> list[tuple[int, Prompt]]:
        """(epoch, prompt) of each group of the step."""
        return [(self._loader.epoch_of(step, i), prompt) for i, prompt in enumerate(self._loader.batch(step))]

    async def _generate_all(
        self,
        step: int,
        batch: Batch,
        put: Callable[[SealedGroup], Awaitable[None]],
        prompts: Sequence[tuple[int, Prompt]],
    ) -> None:
        """Generate a group for each prompt."""

        async def land(landed: PackedLanded) -> None:
            batch.queue.land(landed)
            await self._notify()

        await self._service.producer.run(step, prompts, put, land if self._scores_early else None)

    async def generate_again(self, step: int, index: int) -> SealedGroup:
        """Generate a group of a step again, with the same seeds. There is no dynamic sampling."""
        prompt = self._loader.batch(step)[index]
        return await self._service.producer.run_again(step, index, self._loader.epoch_of(step, index), prompt)

    async def _generate_selected(self, step: int, batch: Batch, put: Callable[[SealedGroup], Awaitable[None]]) -> None:
        """Generate groups for the next prompts until enough of them have unequal rewards (dynamic sampling)."""
        wanted = self._config.train.prompts_per_step
        position = self._position
        selection = DynamicSampling(wanted, wanted * self._config.algorithm.dynamic_sampling_batches, step)

        rewards: dict[int, float] = {}

        async def decide(group: SealedGroup) -> None:
            due = selection.decide(group)
            rewards[group.index] = fmean(group.rewards)
            if due and selection.used is not None:
                batch.reward_tried = fmean(rewards[number] for number in range(selection.used))
                batch.prompts_used = selection.used
                batch.next_position = position + selection.used
            for one in due:
                await put(one)

        prompts = map(self._loader.at, itertools.count(position))
        await self._service.producer.run_until(step, prompts, decide, selection)
