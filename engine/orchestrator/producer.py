"""Generates and scores the groups of a step (the temporary data generator of Periodic Asynchrony, §4.3)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from engine.data.loader import sampling_seed
from engine.errors import DeadlineError, MetronomeError
from engine.orchestrator.dynamic_sampling import DynamicSampling
from engine.orchestrator.pool.instance import Instance, Place
from engine.orchestrator.pool.instance_client import (
    Busy,
    InstanceFault,
    InstanceGone,
    Refused,
    SamplingSettings,
)
from engine.orchestrator.pool.pool import Pool
from engine.orchestrator.run_events import RunEvents
from engine.orchestrator.workers.program_pool import Episode, ProgramPool
from engine.reward.scorer import ResponseScorer
from engine.run.trace import Trace
from engine.schedule import Schedule
from engine.types import Group, Prompt, Score
from engine.wire.columns import Decode, PackedResponse, Row, open_group, pack_row, pack_scores
from engine.wire.routes import pack_routes

ScoreTask = asyncio.Task[list[Score]]
"""The task that scores a response."""

Put = Callable[[Row], Awaitable[None]]
"""Called with each group once it is complete."""
OnFinished = Callable[[int, int], Awaitable[None]]
"""Called with a group's index and a response's number in it as the response arrives, before its group is complete."""


FAULTS = 10
"""Number of times that instances may fail on one response before the run fails."""
EVALUATION = -1
"""Epoch in the sampling seeds of evaluations. No training step uses it, and it is the same for all models."""
BUSY_S = 0.2
"""Seconds to wait before resending a request that a paused instance refused."""


@dataclass(eq=False)
class _PendingGroup:
    """State of a group that is being generated."""

    step: int
    index: int
    prompt: Prompt
    seeds: Sequence[int | None]
    """The seed of each response; None: it has none."""
    verifying: asyncio.TaskGroup
    on_finished: OnFinished | None
    scored: bool = True
    """Whether its responses are scored."""
    done: dict[int, tuple[PackedResponse, ScoreTask | None]] = field(default_factory=dict)
    """By number: the finished responses, with their scoring task if the reward takes one response per call."""
    episodes: dict[int, Episode] = field(default_factory=dict)
    """By number: the responses that a program samples in turns (rollout.program)."""
    so_far: dict[int, PackedResponse] = field(default_factory=dict)
    """By number: the first parts of responses or turns that a weight update interrupted (rollout.partial)."""
    faults: Counter[int] = field(default_factory=Counter)
    """By number: how often instances have failed on the response."""
    failed_on: tuple[Instance, ...] = ()
    """The instance that failed or was paused in the last attempt; empty if none did."""
    busy: bool = False
    """Whether an instance refused a request of the last attempt because it was paused."""
    refused_since: float | None = None
    """Monotonic time since which every instance has refused the group as paused; None after any other outcome.

    Time spent waiting for a place is added to it, and so does not count.
    """

    @property
    def missing(self) -> list[int]:
        """Numbers of the responses that are not finished."""
        return [number for number in range(len(self.seeds)) if number not in self.done]

    def where(self, number: int) -> str:
        """Describe a response, for messages."""
        return f"step {self.step}, generating: response {number} to prompt {self.prompt.id}"

    def count_failure(self, number: int, error: MetronomeError) -> None:
        """Count a failure. Raises MetronomeError once instances have failed FAULTS times on the response."""
        self.faults[number] += 1
        if self.faults[number] >= FAULTS:
            raise MetronomeError(f"{self.where(number)} failed {FAULTS} times; last error: {error}") from error

    def check_refusals(self, number: int, error: Busy, limit_s: float) -> None:
        """Raise DeadlineError if only paused instances have been found for `limit_s` seconds."""
        self.refused_since = self.refused_since or time.monotonic()
        if time.monotonic() - self.refused_since > limit_s:
            raise DeadlineError(
                f"{self.where(number)} found no instance that takes it in {limit_s:g} s: {error}"
            ) from error


class Producer:
    """Generates groups: sends all requests of a prompt to one instance, then packs and scores the responses."""

    def __init__(
        self,
        pool: Pool,
        verifier: ResponseScorer,
        sampling: SamplingSettings,
        group_size: int,
        seed: int,
        trace: Trace,
        deadlines_count: bool = True,
        notices: RunEvents | None = None,
        programs: ProgramPool | None = None,
        mask_truncated: bool = False,
    ) -> None:
        """`deadlines_count`: whether a response that takes longer than rollout.timeout_s counts as a failure of the
        instance. `notices`: receives problems with responses and scores. `programs`: samples responses in turns
        (rollout.program). `mask_truncated`: algorithm.mask_truncated."""
        self._pool = pool
        self._verifier = verifier
        self._sampling = sampling
        self._group_size = group_size
        self._seed = seed
        self._trace = trace
        self._deadlines_count = deadlines_count
        self._notices = notices or RunEvents()
        self._programs = programs
        self._mask_truncated = mask_truncated
        self._told_rewrite = False

    async def run(
        self,
        step: int,
        prompts: Sequence[tuple[int, Prompt]],
        put: Put,
        on_finished: OnFinished | None = None,
        sampled: Put | None = None,
    ) -> None:
        """Generate a group for each (epoch, prompt). `put` gets each finished group, `on_finished` each finished
        response, and `sampled` each group once all of its responses have arrived, before they are scored.

        Groups are sent out in order, and each as a whole once an instance has a slot for each of its responses, so that
        whole groups finish early and training can start early. The first failure cancels the rest and is raised.
        """
        generate = partial(self._generate_group, step, put=put, on_finished=on_finished, sampled=sampled)
        with raising_first():
            async with asyncio.TaskGroup() as tasks:
                for index, (epoch, prompt) in enumerate(prompts):
                    tasks.create_task(generate(index, epoch, prompt))

    async def run_until(
        self,
        step: int,
        prompts: Iterator[tuple[int, Prompt]],
        put: Put,
        selection: DynamicSampling,
    ) -> None:
        """Generate groups for (epoch, prompt) pairs, in order and numbered from 0, until `selection` is complete.

        `put` gets each finished group and passes it to the selection. More prompts are started than may be needed, to
        keep the instances busy: another one as soon as the instances have room for a group, whatever the slowest
        responses of the earlier ones do. A group that is being scored still occupies all its slots here, because
        its scores may complete the selection. At the end, groups that are still being generated are cancelled, but a
        `put` that has begun is awaited, because the selection is complete before its last group is put. The first
        failure cancels the rest and is raised.
        """
        tried = 0
        left = dict[int, int]()  # responses of each group that have not ended; of a group that is being scored, all
        running = set[asyncio.Task[None]]()
        putting = set[asyncio.Task[None] | None]()
        changed = asyncio.Event()

        async def begin(group: Row) -> None:
            putting.add(asyncio.current_task())
            await put(group)

        async def end_response(index: int, number: int) -> None:
            left[index] = left[index] - 1 or self._group_size
            changed.set()

        def end_group(index: int, task: asyncio.Task[None]) -> None:
            del left[index]
            running.discard(task)
            changed.set()

        def has_room() -> bool:
            return sum(left.values()) + self._group_size <= self._pool.serving * self._pool.slots

        generate = partial(self._generate_group, step, put=begin, on_finished=end_response)
        with raising_first():
            async with asyncio.TaskGroup() as tasks:
                while not selection.complete:
                    changed.clear()
                    while selection.wants(tried, len(running), has_room()):
                        epoch, prompt = next(prompts)
                        task = tasks.create_task(generate(tried, epoch, prompt))
                        task.add_done_callback(partial(end_group, tried))
                        running.add(task)
                        left[tried] = self._group_size
                        tried += 1
                    await changed.wait()
                for task in running - putting:
                    task.cancel()

    async def _generate_group(
        self,
        step: int,
        index: int,
        epoch: int,
        prompt: Prompt,
        put: Put,
        on_finished: OnFinished | None,
        sampled: Put | None = None,
    ) -> None:
        """Generate and score one group, then `put` it."""
        seeds = [self._seed_of(epoch, prompt, number) for number in range(self._group_size)]
        async with asyncio.TaskGroup() as verifying:
            work = _PendingGroup(
                step=step, index=index, prompt=prompt, seeds=seeds, verifying=verifying, on_finished=on_finished
            )
            try:
                while missing := work.missing:  # retries what an instance did not finish, with the same seeds
                    await self._send_missing(work, missing)
            finally:
                for episode in work.episodes.values():
                    episode.close()
            responses, verdicts = zip(*(work.done[number] for number in range(len(seeds))), strict=True)
            row = pack_row(step, index, prompt, responses, self._mask_truncated)
            if (experts := self._sampling.experts) is not None:
                row = row.with_columns([pack_routes(len(prompt.token_ids), responses, experts)])
            if sampled is not None:
                await sampled(row)
        scores = await self._scores(work, responses, verdicts)
        self._notices.count_group(responses, scores, self._sampling.max_new_tokens)
        await put(row.with_columns([pack_scores(scores)]))

    async def _scores(
        self, work: _PendingGroup, responses: Sequence[PackedResponse], verdicts: Sequence[ScoreTask | None]
    ) -> list[Score]:
        """Return the group's scores: those of its programs, and the reward's for the others."""
        own = [work.episodes[number].score if work.episodes else None for number in range(len(responses))]
        if self._verifier.per_response:
            found = [verdict.result()[0] if verdict is not None else None for verdict in verdicts]
        elif None in own:
            found = list(await self._score(work.step, work.index, work.prompt, responses))
        else:
            found = [None] * len(own)
        scores = [mine or given for mine, given in zip(own, found, strict=True)]
        if not work.episodes:
            return [score for score in scores if score is not None]
        return [
            replace(score, metrics={**score.metrics, **work.episodes[number].figures()})
            for number, score in enumerate(scores)
            if score is not None
        ]

    def _seed_of(self, epoch: int, prompt: Prompt, number: int) -> int | None:
        return sampling_seed(self._seed, epoch, prompt.id, number) if self._sampling.seeded else None

    async def sample(self, step: int, prompt: Prompt, seeds: Sequence[int]) -> list[PackedResponse]:
        """Sample a response for each seed, without scoring. `step`: for messages and the trace.

        Raises MetronomeError as `run` does.
        """
        with raising_first():
            async with asyncio.TaskGroup() as verifying:
                work = _PendingGroup(
                    step=step, index=-1, prompt=prompt, seeds=seeds, verifying=verifying, on_finished=None, scored=False
                )
                while missing := work.missing:
                    await self._send_missing(work, missing)
        return [work.done[number][0] for number in range(len(seeds))]

    async def _send_missing(self, work: _PendingGroup, missing: list[int]) -> None:
        """Send the requests for the missing responses to one instance, and wait until each has finished or failed.

        An instance that failed last time is avoided if another one serves.
        """
        asked_at = time.monotonic()
        async with self._pool.borrow(
            avoid=work.failed_on,
            first=bool(work.so_far or work.episodes),
            least=self._oldest_version(work.step),
            size=len(missing),
        ) as place:
            if work.refused_since is not None:
                work.refused_since += time.monotonic() - asked_at
            work.failed_on = ()
            began = time.monotonic()
            beside = place.instance.responses
            async with asyncio.TaskGroup() as sampling:
                for number in missing:
                    sampling.create_task(self._sample_response(work, number, place))
            if len(missing) == self._group_size and not work.missing and not work.so_far:
                beside = max(beside, place.instance.responses)
                place.instance.record_group(time.monotonic() - began, beside / self._group_size)
        if work.busy:
            work.busy = False
            await asyncio.sleep(BUSY_S)

    def _oldest_version(self, step: int) -> int | None:
        """Return the oldest weight version that may sample for the step when training in mode "bounded"; else None.

        In that mode the instances may hold different versions.
        """
        config = self._pool.config
        if not self._pool.synced or config.train.mode != "bounded":
            return None
        return Schedule.of(config.train, config.rollout.partial).accepted(step).start

    async def _sample_response(self, work: _PendingGroup, number: int, place: Place) -> None:
        """Sample one response on the place's instance, or note in `work` that the instance failed on it. Free its slot
        when it ends, whatever the rest of its group does.

        A reward that takes one response per call starts at once. This method does not wait for it.
        """
        own = None
        try:
            if self._programs is not None and work.scored:
                found = await self._run_program(self._programs, work, number, place)
                own = work.episodes[number].score
            else:
                found = await self._sample_turn(
                    work=work,
                    number=number,
                    place=place,
                    prompt=work.prompt,
                    sampling=self._sampling,
                    seed=work.seeds[number],
                )
            if found is None:
                return
            if work.on_finished is not None:
                await work.on_finished(work.index, number)
            verify = work.scored and self._verifier.per_response and own is None
            score = self._score(work.step, work.index, work.prompt, (found,)) if verify else None
            work.done[number] = found, work.verifying.create_task(score) if score is not None else None
        finally:
            self._pool.free_slot(place)

    async def _run_program(
        self, programs: ProgramPool, work: _PendingGroup, number: int, place: Place
    ) -> PackedResponse | None:
        """Sample the turns of a response. Return the response, or None if the instance failed on a turn: the turn is
        then sampled again with the same seed, elsewhere if another instance serves."""
        if number not in work.episodes:
            work.episodes[number] = programs.begin_episode(work.prompt, work.seeds[number], self._sampling)
        episode = work.episodes[number]
        while True:
            began = time.time()
            turn = await episode.next_turn()
            self._trace.add_span(
                "program", began, time.time(), lane="programs", step=work.step, group=work.index, number=number
            )
            if turn is None:
                self._tell_rewrite(episode.rewritten)
                return episode.response()
            sampled = await self._sample_turn(
                work=work,
                number=number,
                place=place,
                prompt=turn.prompt,
                sampling=turn.sampling,
                seed=turn.seed,
            )
            if sampled is None:
                work.so_far.pop(number, None)
                return None
            episode.add_turn(sampled)

    def _tell_rewrite(self, rewritten: str) -> None:
        """Say once that the chat template rewrites turns."""
        if rewritten and not self._told_rewrite:
            self._told_rewrite = True
            self._notices.happened(
                "responses",
                "rewritten",
                f"the chat template would write an earlier turn otherwise than it was sampled, {rewritten}; it stays "
                "as it was sampled",
            )

    async def _sample_turn(
        self,
        work: _PendingGroup,
        number: int,
        place: Place,
        prompt: Prompt,
        sampling: SamplingSettings,
        seed: int | None,
    ) -> PackedResponse | None:
        """Sample one response or one turn of it. Return None if the instance failed on it or a pause cut it."""
        started = time.time()
        instance = place.instance
        try:
            sampled = await instance.client.complete(prompt, sampling, seed, work.so_far.get(number))
        except Busy as error:
            work.busy = True
            work.failed_on = (instance,)
            work.check_refusals(number, error, self._pool.config.rollout.timeout_s)
            return None
        except (InstanceGone, InstanceFault, DeadlineError) as error:
            work.count_failure(number, error)
            if self._deadlines_count or not isinstance(error, DeadlineError):
                self._pool.record_failure(place, error)
            work.failed_on = (instance,)
            work.refused_since = None
            return None
        except Refused as error:
            raise Refused(f"{work.where(number)}: {error}") from error
        instance.record_success()
        work.refused_since = None
        before = work.so_far.get(number)
        self._trace.add_span(
            "rollout",
            started,
            time.time(),
            lane=instance.name,
            step=work.step,
            group=work.index,
            number=number,
            prompt_tokens=len(prompt.token_ids),
            tokens=sampled.length - (before.length if before is not None else 0),
            **({"version": sampled.versions[-1][1]} if sampled.versions else {}),
        )
        if sampled.finish_reason == "abort":
            work.so_far[number] = sampled  # the next attempt continues from it
            return None
        return sampled

    async def _score(self, step: int, index: int, prompt: Prompt, responses: Sequence[PackedResponse]) -> list[Score]:
        started = time.time()
        scores = await self._verifier.score(prompt, responses)
        self._trace.add_span("verify", started, time.time(), lane="verifier", step=step, group=index)
        return scores


@contextmanager
def raising_first() -> Iterator[None]:
    """Raise the first exception of a (nested) group that the body raises. The others only follow from the cancellation
    that it caused."""
    try:
        yield
    except ExceptionGroup as failures:
        first: Exception = failures
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        raise first from failures


async def sample_groups(
    producer: Producer,
    prompts: Sequence[Prompt],
    decode: Decode,
    step: int = 0,
    on_finished: OnFinished | None = None,
    scored: Callable[[Sequence[Score]], None] = lambda scores: None,
) -> list[Group]:
    """Generate a group of an evaluation for each prompt. Return them in the order of the prompts, with the text of the
    responses. `on_finished` gets each response, and `scored` the scores of each group, as they arrive."""
    groups: list[Group] = []

    async def put(row: Row) -> None:
        group = await asyncio.to_thread(open_group, row, decode=decode)
        groups.append(replace(group, prompt=prompts[group.index]))
        scored(group.scores)

    await producer.run(step, [(EVALUATION, prompt) for prompt in prompts], put, on_finished)
    return sorted(groups, key=lambda group: group.index)
