"""The temporary data generator of Periodic Asynchrony §4.3: sends a step's prompts out, verifies, groups, queues."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from engine.data.loader import sampling_seed
from engine.rollout.client import InstanceGone, Sampling
from engine.rollout.pool import Instance, Pool
from engine.trace import Trace
from engine.types import Group, Landed, Prompt, Response, Score

Verdict = asyncio.Task[list[Score]]
"""A response's scores, as soon as they are there."""

Land = Callable[[Landed], Awaitable[None]]
"""Told of each response as it lands, before its group is complete."""


class Verifier(Protocol):
    """What the producer asks of the verifier workers."""

    @property
    def per_response(self) -> bool:
        """Whether responses are scored one by one, as they land."""

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> list[Score]:
        """Scores of the responses, in order."""


class Producer:
    """Generates groups: G requests of a prompt together on one instance, each response verified as it lands."""

    def __init__(
        self,
        pool: Pool,
        verifier: Verifier,
        decode: Callable[[Sequence[int]], str],
        sampling: Sampling,
        group_size: int,
        seed: int,
        trace: Trace,
    ) -> None:
        self._pool = pool
        self._verifier = verifier
        self._decode = decode
        self._sampling = sampling
        self._group_size = group_size
        self._seed = seed
        self._trace = trace

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
                    tasks.create_task(self._group(step, index, epoch, prompt, put, land))
        except ExceptionGroup as failures:
            raise first_leaf(failures) from failures

    async def _group(
        self, step: int, index: int, epoch: int, prompt: Prompt, put: Callable[[Group], Awaitable[None]], land: Land | None
    ) -> None:
        seeds = [sampling_seed(self._seed, epoch, prompt.id, number) for number in range(self._group_size)]
        done: dict[int, tuple[Response, Verdict | None]] = {}
        async with asyncio.TaskGroup() as verifying:
            while len(done) < len(seeds):  # again only for what a dying instance did not finish, with the same seeds
                missing = [number for number in range(len(seeds)) if number not in done]
                async with self._pool.borrow() as instance, asyncio.TaskGroup() as sampling:
                    tasks = {
                        number: sampling.create_task(
                            self._respond(step, index, prompt, number, seeds[number], instance, verifying, land)
                        )
                        for number in missing
                    }
                done.update((number, found) for number, task in tasks.items() if (found := task.result()) is not None)
        responses, verdicts = zip(*(done[number] for number in range(len(seeds))), strict=True)
        if self._verifier.per_response:
            scores = [score for verdict in verdicts for score in verdict.result()]
        else:
            scores = await self._verify(step, index, prompt, responses)
        await put(Group(step, index, prompt, responses, tuple(scores)))

    async def _respond(
        self, step: int, index: int, prompt: Prompt, number: int, seed: int, instance: Instance,
        verifying: asyncio.TaskGroup, land: Land | None,
    ) -> tuple[Response, Verdict | None] | None:
        """One response, None when the instance died on it. A per-response verdict starts at once, and holds up nothing."""
        started = time.time()
        try:
            sampled = await instance.client.complete(prompt, self._sampling, seed)
        except InstanceGone:
            await self._pool.drop(instance)
            return None
        self._trace.add("rollout", started, time.time(), lane=instance.client.name, step=step, group=index)
        if land is not None:
            await land(Landed(step, index, number, prompt.token_ids, sampled.token_ids))
        response = dataclasses.replace(sampled, text=self._decode(sampled.token_ids))
        if not self._verifier.per_response:
            return response, None
        return response, verifying.create_task(self._verify(step, index, prompt, (response,)))

    async def _verify(self, step: int, index: int, prompt: Prompt, responses: Sequence[Response]) -> list[Score]:
        started = time.time()
        scores = await self._verifier.score(prompt, list(responses))
        self._trace.add("verify", started, time.time(), lane="verifier", step=step, group=index)
        return scores


def first_leaf(failures: ExceptionGroup[Exception]) -> Exception:
    """The first exception of a (nested) group: what a caller can act on; the others followed from its cancellations."""
    first = failures.exceptions[0]
    return first_leaf(first) if isinstance(first, ExceptionGroup) else first
