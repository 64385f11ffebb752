"""The embedded engine behind the HTTP routes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from engine.instance.embedded.engine import Engine
from engine.instance.embedded.engine_thread import EngineThread
from engine.instance.embedded.sampling import Sampling
from engine.instance.embedded.updates import Updates
from engine.instance.protocol import Completion, RequestLimits
from engine.instance.replies import Result


class EmbeddedBackend(Updates):
    """A Backend that calls the engine in its thread. Its base class has the weight updates."""

    world_size = 1

    def __init__(self, worker: EngineThread, limits: RequestLimits, model: str) -> None:
        super().__init__(worker, Path(model))
        self.limits = limits
        self.model = model

    async def complete(self, asked: Completion, on_token: Callable[[int, float], None] | None = None) -> Result:
        """Sample one response; `on_token` hears of each token and its log-probability. Raise Conflict after a weight
        update that failed half-way."""
        return await self._worker.complete(asked.prompt, sampling_of(asked), asked.prompt_logprobs, on_token)

    async def check_health(self) -> None:
        """Do nothing: while the process lives, so does the engine's thread."""

    async def weight_version(self) -> int:
        """Return Engine.version."""
        return await self._worker.call(lambda engine: engine.version)

    async def load(self) -> dict[str, int]:
        """Return Engine.load."""
        return await self._worker.call(Engine.load)

    async def metrics(self) -> bytes:
        """Return nothing: the engine has no metrics besides those of every instance."""
        return b""

    async def pause(self, abort: bool) -> None:
        """Call Engine.pause and wait until nothing runs."""
        await self._worker.pause(abort)

    async def resume(self) -> None:
        """Call Engine.resume."""
        await self._worker.call(Engine.resume)

    async def reset_prefix_cache(self) -> None:
        """Call PromptCache.clear."""
        await self._worker.call(lambda engine: engine.prompts.clear())


def sampling_of(asked: Completion) -> Sampling:
    """Return the sampling parameters of a completion. One without a seed gets a random seed."""
    return Sampling(
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=int.from_bytes(os.urandom(7)) if asked.seed is None else asked.seed,
        stop_ids=asked.stop_ids,
        continued=asked.continued,
    )
