"""The batches that have started and are not over. If the generation of a batch fails or ends too early, the run
stops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from engine.errors import MetronomeError
from engine.orchestrator.batches import Batch
from engine.orchestrator.run_state import RunState
from engine.run.logs import log_traceback


class BatchesInFlight:
    """The batches by step, each from its start until it is popped."""

    def __init__(self, run_state: RunState, drop_step: Callable[[int], None] | None = None) -> None:
        """`drop_step`: forgets a step whose generation ended with an unexpected exception, so that it may begin again;
        None: such an exception ends the run."""
        self._run_state = run_state
        self._drop_step = drop_step
        self._by_step: dict[int, Batch] = {}
        self._failed: dict[int, MetronomeError] = {}
        """By step: why it was dropped."""

    def start_batch(self, batch: Batch, generate: Callable[[], Awaitable[None]]) -> None:
        """Keep a batch, and generate it in the background."""
        self._by_step[batch.step] = batch
        self._failed.pop(batch.step, None)
        batch.task = asyncio.create_task(self._generate(batch.step, generate))

    async def _generate(self, step: int, generate: Callable[[], Awaitable[None]]) -> None:
        try:
            await generate()
        except MetronomeError as error:
            await self._run_state.stop_run(error)
        except OSError:
            raise  # a full disk, which the orchestrator names
        except Exception as error:
            log_traceback(error)  # a bug; as after any other failure, the trainer saves a checkpoint
            what = f"step {step}: its generation failed, unexpected {type(error).__name__}: {error}"
            if self._drop_step is None:
                await self._run_state.stop_run(MetronomeError(f"{what}; the orchestrator's log has the traceback"))
                return
            self._failed = {
                step: MetronomeError(f"{what}; the traceback is in the service's log; put its prompts again")
            }
            self.pop_batch(step)
            self._drop_step(step)
            await self._run_state.notify()

    def check_step(self, step: int | None) -> None:
        """Raise the error for which a step was dropped, if it was."""
        if step in self._failed:
            raise self._failed[step]

    def get_batch(self, step: int) -> Batch | None:
        """Return the batch of a step; None if it has not started, or is over."""
        return self._by_step.get(step)

    def pop_batch(self, step: int) -> Batch | None:
        """Remove and return the batch of a step that is over."""
        return self._by_step.pop(step, None)

    @property
    def steps(self) -> list[int]:
        """The steps of the batches."""
        return list(self._by_step)

    @property
    def oldest(self) -> Batch | None:
        """The batch of the earliest step in progress; None if there is none."""
        return min(self._by_step.values(), key=lambda batch: batch.step, default=None)

    def values(self) -> list[Batch]:
        """All batches."""
        return list(self._by_step.values())

    async def check_generation(self) -> None:
        """Stop the run if a generation ended with groups missing.

        Raises an OSError of a generation.
        """
        for batch in self.values():
            if batch.task is not None and batch.task.done():
                batch.task.result()
                if self._run_state.failure is None and not batch.generated:
                    await self._run_state.stop_run(
                        MetronomeError(
                            f"step {batch.step}: its generation ended with {batch.arrived} of {batch.expected} "
                            "groups, so the trainer would wait for ever"
                        )
                    )

    async def close(self) -> None:
        """Cancel the generations in progress."""
        tasks = [batch.task for batch in self._by_step.values() if batch.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
