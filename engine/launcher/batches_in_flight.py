"""The batches that are started and not over yet. A batch whose generation fails, or ends too early, stops the run."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from engine.errors import MetronomeError
from engine.launcher.batches import Batch
from engine.launcher.run_state import RunState


class BatchesInFlight:
    """By step: each batch from its start until it is popped."""

    def __init__(self, run_state: RunState) -> None:
        self._run_state = run_state
        self._by_step: dict[int, Batch] = {}

    def start(self, step: int, batch: Batch, generating: Coroutine[Any, Any, None]) -> None:
        """Keep the batch of a step, and generate it in the background."""
        self._by_step[step] = batch
        batch.task = asyncio.create_task(self._generate(generating))

    async def _generate(self, generating: Coroutine[Any, Any, None]) -> None:
        try:
            await generating
        except MetronomeError as error:
            await self._run_state.fail(error)

    def keep(self, step: int, batch: Batch) -> None:
        """Keep the batch of a step whose groups come from outside."""
        self._by_step[step] = batch

    def get(self, step: int) -> Batch | None:
        """The batch of a step; None if it was not started, or is over."""
        return self._by_step.get(step)

    def pop(self, step: int) -> Batch | None:
        """The batch of a step, which is over now."""
        return self._by_step.pop(step, None)

    @property
    def steps(self) -> list[int]:
        """The steps of the batches."""
        return list(self._by_step)

    @property
    def oldest(self) -> tuple[int, Batch] | None:
        """The first step under way, with its batch; None if there is none."""
        return min(self._by_step.items(), key=lambda item: item[0], default=None)

    def values(self) -> list[Batch]:
        """All batches."""
        return list(self._by_step.values())

    async def check(self) -> None:
        """Stop the run if a generation ended without all of its groups.

        Raises an exception of a generation that is not a MetronomeError: that is a bug of the launcher.
        """
        for step, batch in list(self._by_step.items()):
            if batch.task is not None and batch.task.done():
                batch.task.result()
                if self._run_state.failure is None and not batch.generated:
                    await self._run_state.fail(
                        MetronomeError(
                            f"step {step}: its generation ended with {batch.queue.arrived} of "
                            f"{batch.queue.expected} groups, so the trainer would wait for ever"
                        )
                    )

    async def close(self) -> None:
        """Cancel the generations under way."""
        tasks = [batch.task for batch in self._by_step.values() if batch.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
