"""Makes the batch of a step and has its responses sampled. The producer gets the prompts; each group becomes a row of
the table, first with its responses, then with their scores."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from engine.config import Config
from engine.data.loader import PromptLoader
from engine.errors import BadInput, MetronomeError
from engine.orchestrator.column_store import ColumnStore
from engine.orchestrator.dynamic_sampling import MOST_BATCHES, DynamicSampling
from engine.orchestrator.pool.instance import Instance
from engine.orchestrator.rollout_service import RolloutService
from engine.orchestrator.table import RowTable
from engine.run.folder import SAMPLED_GROUPS
from engine.run.logs import log_line
from engine.types import Prompt
from engine.wire.columns import Row, open_scores
from engine.wire.rollout_messages import Acknowledged, InstanceRequest, StartProfile, StopProfile


@dataclass
class Batch:
    """The orchestrator's state of one step, from its start to its report; its rows are in the table."""

    step: int
    table: RowTable
    before: Batch | None = None
    """With dynamic sampling: the batch that must be generated before this one, if any."""
    samples: list[Row] = field(default_factory=list)
    """The first groups, which the run folder keeps for people to read."""
    prompts_used: int | None = None
    """Number of prompts up to and including the last one that was kept; None without dynamic sampling, or while
    unknown."""
    reward_tried: float | None = None
    """Mean score of the responses to the first `prompts_used` prompts; None as above."""
    next_position: int | None = None
    """Position in the order of prompts at which the next batch begins; None as above."""
    rollout_s: float = 0.0
    """Seconds from the start of generation until the last group arrived."""
    task: asyncio.Task[None] | None = None
    """The task that generates the batch; None before it starts."""

    @property
    def expected(self) -> int:
        """Number of groups in the batch."""
        return self.table.ledger(self.step).expected

    @property
    def arrived(self) -> int:
        """Number of groups that have arrived with their scores."""
        return self.table.arrived(self.step)

    @property
    def trained(self) -> int:
        """Number of groups that are trained."""
        return self.table.ledger(self.step).done

    @property
    def generated(self) -> bool:
        """Whether every group has arrived; True once the step is over."""
        return self.table.is_generated(self.step)

    def keep_sample(self, row: Row) -> None:
        """Keep the row for people to read if it is among the first."""
        if len(self.samples) < SAMPLED_GROUPS:
            self.samples.append(row)


class RolloutProfile:
    """Has the run's own instances record a profile, from the start of the first batch in train.profile until the last
    one is generated. An instance that can't record one reports this, and the run goes on."""

    def __init__(self, service: RolloutService, steps: Sequence[int]) -> None:
        """`steps`: the first and the last step, or empty."""
        self._service = service
        self._steps = range(steps[0], steps[1] + 1) if steps else range(0)
        self._begun = False
        self._recording: list[Instance] = []

    async def begin_step(self, step: int) -> None:
        """Start recording when the generation of a batch begins. A resumed run may begin after the first batch."""
        if step in self._steps and not self._begun:
            self._begun = True
            own = [instance for instance in self._service.pool.instances if instance.declared is not None]
            self._recording = await self._send(own, StartProfile)

    async def end_step(self, step: int) -> None:
        """Stop recording once the last batch is generated."""
        if self._recording and step == self._steps[-1]:
            recording = self._recording
            self._recording = []
            await self._send(recording, StopProfile)

    async def _send(
        self, instances: Sequence[Instance], request: type[InstanceRequest[Acknowledged]]
    ) -> list[Instance]:
        """Send the request to all instances. Return those that carried it out."""
        replies = await asyncio.gather(*(one.client.call(request()) for one in instances), return_exceptions=True)
        done: list[Instance] = []
        for one, reply in zip(instances, replies, strict=True):
            if isinstance(reply, MetronomeError):
                log_line(f"train.profile: {one.name} is not profiled: {reply}")
            elif isinstance(reply, BaseException):
                raise reply
            else:
                done.append(one)
        return done


class BatchGenerator:
    """Generates batches. With dynamic sampling, a batch begins after the last prompt that the previous batch used."""

    def __init__(
        self,
        config: Config,
        loader: PromptLoader,
        service: RolloutService,
        table: RowTable,
        store: ColumnStore,
        notify: Callable[[], Awaitable[None]],
    ) -> None:
        """`notify` is called whenever there is something new to lease."""
        self.replica_groups = config.parallel.replica_groups
        """Number of the trainer's replica groups that take windows independently."""
        self._table = table
        self._store = store
        self._config = config
        self._loader = loader
        self._service = service
        self._notify = notify
        self._profile = RolloutProfile(service, config.train.profile)
        self._position = 0
        self._previous: Batch | None = None

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the run's prompts, in their order."""
        return self._loader.fingerprint

    def resume_at(self, step: int, position: int | None, prompts: str | None = None) -> None:
        """Begin with `step`. The trainer's checkpoint gives the other two: `position` is the number of prompts used
        before `step`, and `prompts` is the fingerprint of the run's prompts.

        Raises BadInput if the checkpoint was trained on other prompts, or if dynamic sampling needs the position and
        the checkpoint does not have it.
        """
        if prompts not in (None, self.fingerprint) and "prompts" not in self._config.run.accept:
            raise BadInput(
                "--resume: the prompts of this run, their order, tokens or columns differ from those that its "
                "checkpoint was trained on. They depend on the content of data.train and data.heldout, on the "
                "benchmarks that data.train is compared with (evaluate.benchmark, evaluate.folder), on "
                "reward.function and rollout.max_context, and their tokens on the tokenizer of model.path and its chat "
                "template: resume with these unchanged, or start a new run from the trained policy"
            )
        if self._config.algorithm.dynamic_sampling and step and position is None:
            raise BadInput(
                f"--resume: the checkpoint before step {step} does not say how many prompts were used, which "
                "algorithm.dynamic_sampling needs (a replay wrote it); resume from another checkpoint"
            )
        self._position = position or 0
        self._previous = None

    def begin_batch(self, step: int) -> Batch:
        """Create the batch of `step` and begin the step in the table. Steps begin in order."""
        self._table.begin_step(step, self._config.train.prompts_per_step, self.replica_groups)
        batch = Batch(step, self._table)
        if self._config.algorithm.dynamic_sampling:
            batch.before, self._previous = self._previous, batch
        return batch

    async def fill_batch(self, batch: Batch, prompts: Sequence[tuple[int, Prompt]] | None = None) -> None:
        """Generate a batch. With dynamic sampling, wait first until the previous batch is generated. Raises
        MetronomeError if generation fails.

        `prompts`: (epoch, prompt) of the groups; None: the next ones of the data.
        """
        if batch.before is not None and batch.before.task is not None:
            await asyncio.wait([batch.before.task])
            if batch.before.next_position is None:
                return  # the previous batch failed, and so did the run
            self._position = batch.before.next_position
            batch.before = None
        await self._profile.begin_step(batch.step)
        started = time.perf_counter()

        async def put(row: Row) -> None:
            batch.keep_sample(row)
            await self._put(row)
            batch.rollout_s = time.perf_counter() - started

        if self._config.algorithm.dynamic_sampling:
            await self._generate_selected(batch, put, prompts)
        else:
            await self._generate_all(batch, put, prompts or self._prompts(batch.step))
        await self._profile.end_step(batch.step)

    async def _put(self, row: Row) -> None:
        """Put a row into the table, or only its new columns if the row is already there."""
        known = self._table.find_row(row.step, row.index)
        if known is not None:
            row = row.only(row.names - known.names)
        kept = await self._store.put_columns(row)
        if known is None:
            self._table.add_row(kept)
        else:
            self._table.add_columns(kept.step, kept.index, kept.columns)
        await self._notify()

    def _prompts(self, step: int) -> list[tuple[int, Prompt]]:
        """Return (epoch, prompt) of each group of the step."""
        return [(self._loader.epoch_of(step, i), prompt) for i, prompt in enumerate(self._loader.batch(step))]

    async def _generate_all(
        self, batch: Batch, put: Callable[[Row], Awaitable[None]], prompts: Sequence[tuple[int, Prompt]]
    ) -> None:
        """Generate a group for each prompt. Responses enter the table before they are scored, so that stages that do
        not need the scores can begin."""
        await self._service.producer.run(step=batch.step, prompts=prompts, put=put, sampled=self._put)

    async def _generate_selected(
        self, batch: Batch, put: Callable[[Row], Awaitable[None]], prompts: Sequence[tuple[int, Prompt]] | None
    ) -> None:
        """Generate groups for the next prompts until enough of them have unequal rewards (dynamic sampling)."""
        wanted = self._config.train.prompts_per_step
        position = self._position
        limit = wanted * MOST_BATCHES if prompts is None else len(prompts)
        selection = DynamicSampling(wanted, limit, batch.step)
        rewards: dict[int, float] = {}

        async def decide(row: Row) -> None:
            rewards[row.index] = fmean(score.value for score in open_scores(row))
            due = selection.add_group(row)
            if due and selection.used is not None:
                batch.reward_tried = fmean(rewards[number] for number in range(selection.used))
                batch.prompts_used = selection.used
                batch.next_position = position + selection.used
            for one in due:
                await put(one)

        tried = map(self._loader.at, itertools.count(position)) if prompts is None else iter(prompts)
        await self._service.producer.run_until(batch.step, tried, decide, selection)
