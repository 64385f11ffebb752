"""The embedded engine behind the HTTP routes."""

from __future__ import annotations

import os
from pathlib import Path

from engine.instance.embedded.engine import Engine
from engine.instance.embedded.engine_thread import EngineThread
from engine.instance.embedded.sampling import Sampling
from engine.instance.embedded.updates import Updates
from engine.instance.protocol import Completion, RequestLimits
from engine.instance.replies import Result


class EmbeddedBackend(Updates):
    """A Backend: calls to the engine's thread, beside its weight updates."""

    world_size = 1

    def __init__(self, worker: EngineThread, limits: RequestLimits, model: str) -> None:
        super().__init__(worker, Path(model))
        self.limits = limits
        self.model = model

    async def complete(self, asked: Completion) -> Result:
        """Conflict after a weight update that failed half-way."""
        return await self._worker.complete(asked.prompt, sampling_of(asked), asked.prompt_logprobs)

    async def check_health(self) -> None:
        """It lives: the process ends with the engine's thread."""

    async def weight_version(self) -> int:
        """Engine.version."""
        return await self._worker.call(lambda engine: engine.version)

    async def load(self) -> dict[str, int]:
        """Engine.load."""
        return await self._worker.call(Engine.load)

    async def metrics(self) -> bytes:
        """None but those of every instance."""
        return b""

    async def pause(self, abort: bool) -> None:
        """Engine.pause."""
        await self._worker.pause(abort)

    async def resume(self) -> None:
        """Engine.resume."""
        await self._worker.call(Engine.resume)

    async def reset_prefix_cache(self) -> None:
        """PromptCache.clear."""
        await self._worker.call(lambda engine: engine.prompts.clear())


def sampling_of(asked: Completion) -> Sampling:
    """How the response is sampled; a request without a seed gets a random one."""
    return Sampling(
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=int.from_bytes(os.urandom(7)) if asked.seed is None else asked.seed,
        stop_ids=asked.stop_ids,
        continued=asked.continued,
    )
