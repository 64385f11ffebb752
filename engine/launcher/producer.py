"""The temporary data generator of Periodic Asynchrony §4.3: sends a step's prompts out, verifies, groups, queues."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.data.loader import sampling_seed
from engine.errors import DeadlineError, MetronomeError
from engine.launcher.dynamic_sampling import DynamicSampling
from engine.launcher.pool.instance import Instance
from engine.launcher.pool.instance_client import Busy, InstanceFault, InstanceGone, Refused, SamplingSettings
from engine.launcher.pool.pool import Pool
from engine.reward.scorer import Scorer
from engine.run.trace import Trace
from engine.schedule import Schedule
from engine.types import Group, Landed, Prompt, Response, Score

ScoreTask = asyncio.Task[list[Score]]
"""A response's scores, as soon as they are there."""

Land = Callable[[Landed], Awaitable[None]]
"""Told of each response as it lands, before its group is complete."""


FAULTS = 10
"""A response on which instances failed so often fails the run."""
BUSY_S = 0.2
"""Pause before a request is sent again that met a paused instance."""


@dataclass(eq=False)
class _Work:
    """A group that is being generated."""

    step: int
    index: int
    prompt: Prompt
    seeds: list[int]
    verifying: asyncio.TaskGroup
    land: Land | None
    done: dict[int, tuple[Response, ScoreTask | None]] = field(default_factory=dict)
    so_far: dict[int, Response] = field(default_factory=dict)
    """Responses that a weight update cut (rollout.partial), by number."""
    faults: Counter[int] = field(default_factory=Counter)
    failed_on: tuple[Instance, ...] = ()
    """The instance that failed in the last round."""
    busy: bool = False
    """Whether the last round met a paused instance."""
    refused: float | None = None
    """Since when paused instances have refused it, one after the other (monotonic), without the waits for a place."""

    @property
    def missing(self) -> list[int]:
        """Numbers of the responses that are not there yet."""
        return [number for number in range(len(self.seeds)) if number not in self.done]

    def where(self, number: int) -> str:
        """For messages."""
        return f"step {self.step}, generating: response {number} to prompt {self.prompt.id}"

    def fault(self, number: int, error: MetronomeError) -> None:
        """Count it. Raises MetronomeError once the response failed too often."""
        self.faults[number] += 1
        if self.faults[number] >= FAULTS:
            raise MetronomeError(f"{self.where(number)} failed {FAULTS} times, at last: {error}") from error

    def check(self, number: int, error: Busy, limit_s: float) -> None:
        """Raises DeadlineError once the group has met nothing but paused instances for so long."""
        self.refused = self.refused or time.monotonic()
        if time.monotonic() - self.refused > limit_s:
            raise DeadlineError(
                f"{self.where(number)} found no instance that takes it in {limit_s:g} s: {error}"
            ) from error


class Producer:
    """Generates groups: G requests of a prompt together on one instance, each response verified as it lands."""

    def __init__(
        self,
        pool: Pool,
        verifier: Scorer,
        decode: Callable[[Sequence[int]], str],
        sampling: SamplingSettings,
        group_size: int,
        seed: int,
        trace: Trace,
        deadlines_count: bool = True,
    ) -> None:
        """`deadlines_count`: whether a response that takes longer than rollout.timeout_s is a fault of the instance."""
        self._pool = pool
        self._verifier = verifier
        self._decode = decode
        self._sampling = sampling
        self._group_size = group_size
        self._seed = seed
        self._trace = trace
        self._deadlines_count = deadlines_count

    async def run(
        self,
        step: int,
        prompts: Sequence[tuple[int, Prompt]],
        put: Callable[[Group], Awaitable[None]],
        land: Land | None = None,
    ) -> None:
        """Generate a batch of (epoch, prompt) pairs; `put` gets each group when it is finished, `land` each response.

        Groups are dispatched in order with bounded concurrency: whole groups finish early, so training starts early.
        The first failure cancels the rest and is raised.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for index, (epoch, prompt) in enumerate(prompts):
                    tasks.create_task(
                        self._group(step=step, index=index, epoch=epoch, prompt=prompt, put=put, land=land)
                    )
        except ExceptionGroup as failures:
            raise first_leaf(failures) from failures

    async def run_until(
        self,
        step: int,
        prompts: Iterator[tuple[int, Prompt]],
        put: Callable[[Group], Awaitable[None]],
        selection: DynamicSampling,
    ) -> None:
        """Generate groups of (epoch, prompt) pairs, begun in order and numbered from 0, until the `selection` is
        complete.

        `put` gets each group when it is finished and tells the selection. More prompts are begun than may be needed, so
        that instances stay busy; those still generated at the end are called off, those being put are waited for: the
        selection is complete before its last group is. The first failure cancels the rest and is raised.
        """
        tried = 0
        running = set[asyncio.Task[None]]()
        putting = set[asyncio.Task[None] | None]()

        async def begin(group: Group) -> None:
            putting.add(asyncio.current_task())
            await put(group)

        try:
            async with asyncio.TaskGroup() as tasks:
                while not selection.complete:
                    while selection.wants(
                        tried, len(running), self._pool.serving * self._pool.config.rollout.concurrency
                    ):
                        epoch, prompt = next(prompts)
                        running.add(
                            tasks.create_task(
                                self._group(step=step, index=tried, epoch=epoch, prompt=prompt, put=begin, land=None)
                            )
                        )
                        tried += 1
                    _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in running - putting:
                    task.cancel()
        except ExceptionGroup as failures:
            raise first_leaf(failures) from failures

    async def _group(
        self,
        step: int,
        index: int,
        epoch: int,
        prompt: Prompt,
        put: Callable[[Group], Awaitable[None]],
        land: Land | None,
    ) -> None:
        seeds = [sampling_seed(self._seed, epoch, prompt.id, number) for number in range(self._group_size)]
        async with asyncio.TaskGroup() as verifying:
            work = _Work(step=step, index=index, prompt=prompt, seeds=seeds, verifying=verifying, land=land)
            while missing := work.missing:  # again only for what an instance did not finish, with the same seeds
                await self._round(work, missing)
        responses, verdicts = zip(*(work.done[number] for number in range(len(seeds))), strict=True)
        if self._verifier.per_response:
            scores = [score for verdict in verdicts for score in verdict.result()]
        else:
            scores = await self._verify(step, index, prompt, responses)
        await put(Group(step=step, index=index, prompt=prompt, responses=responses, scores=tuple(scores)))

    async def _round(self, work: _Work, missing: list[int]) -> None:
        """Send what is missing to one instance, another one than the last if there is one;
        a trial gets one request only."""
        asked = time.monotonic()
        async with self._pool.borrow(work.failed_on, bool(work.so_far), self._oldest(work.step)) as place:
            if work.refused is not None:
                work.refused += time.monotonic() - asked
            work.failed_on = ()
            numbers = missing[:1] if place.trial else missing
            began = time.monotonic()
            beside = place.instance.groups
            async with asyncio.TaskGroup() as sampling:
                for number in numbers:
                    sampling.create_task(self._respond(work, number, place.instance))
            if len(numbers) == self._group_size and not work.missing and not work.so_far:
                place.instance.finished(time.monotonic() - began, max(beside, place.instance.groups))
        if work.busy:
            work.busy = False
            await asyncio.sleep(BUSY_S)

    def _oldest(self, step: int) -> int | None:
        """In mode "bounded", where instances may hold different versions: the oldest that may sample for the step."""
        config = self._pool.config
        if not self._pool.synced or config.train.mode != "bounded":
            return None
        return Schedule.of(config.train, config.rollout.partial).accepted(step).start

    async def _respond(self, work: _Work, number: int, instance: Instance) -> None:
        """One response, or a note that the instance failed on it.
        A per-response verdict starts at once, and holds up nothing."""
        started = time.time()
        prompt = work.prompt
        try:
            sampled = await instance.client.complete(
                prompt, self._sampling, work.seeds[number], work.so_far.get(number)
            )
        except Busy as error:
            self._pool.busy(instance)
            work.busy = True
            work.failed_on = (instance,)
            work.check(number, error, self._pool.config.rollout.timeout_s)
            return
        except (InstanceGone, InstanceFault, DeadlineError) as error:
            if self._deadlines_count or not isinstance(error, DeadlineError):
                self._pool.fault(instance)
            work.failed_on = (instance,)
            work.refused = None
            work.fault(number, error)
            return
        except Refused as error:
            raise Refused(f"{work.where(number)}: {error}") from error
        self._pool.success(instance)
        work.refused = None
        self._trace.add("rollout", started, time.time(), lane=instance.name, step=work.step, group=work.index)
        if sampled.finish_reason == "abort":
            work.so_far[number] = sampled  # the next round goes on with it
            return
        if work.land is not None:
            await work.land(
                Landed(
                    step=work.step,
                    group=work.index,
                    number=number,
                    prompt=prompt.token_ids,
                    token_ids=sampled.token_ids,
                )
            )
        response = dataclasses.replace(sampled, text=self._decode(sampled.token_ids))
        verify = self._verifier.per_response
        verdict = (
            work.verifying.create_task(self._verify(work.step, work.index, prompt, (response,))) if verify else None
        )
        work.done[number] = response, verdict

    async def _verify(self, step: int, index: int, prompt: Prompt, responses: Sequence[Response]) -> list[Score]:
        started = time.time()
        scores = await self._verifier.score(prompt, list(responses))
        self._trace.add("verify", started, time.time(), lane="verifier", step=step, group=index)
        return scores


def first_leaf(failures: ExceptionGroup[Exception]) -> Exception:
    """The first exception of a (nested) group: what a caller can act on; the others followed from its cancellations."""
    first = failures.exceptions[0]
    return first_leaf(first) if isinstance(first, ExceptionGroup) else first
