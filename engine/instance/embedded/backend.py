"""The embedded engine behind the HTTP routes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from engine.instance.embedded.engine import Engine
from engine.instance.embedded.engine_thread import EngineThread
from engine.instance.embedded.sampling import Sampling
from engine.instance.embedded.updates import Updates
from engine.instance.protocol import Completion, RequestLimits
from engine.instance.replies import Result


class EmbeddedBackend:
    """A Backend: calls to the engine's thread, and its weight updates."""

    world_size = 1

    def __init__(self, worker: EngineThread, limits: RequestLimits, model: str) -> None:
        self.limits = limits
        self.model = model
        self._worker = worker
        self._updates = Updates(worker, Path(model))

    def close(self) -> None:
        """A broadcast under way would keep the process alive until its deadline."""
        self._updates.close()

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

    async def connect(self, init_info: dict[str, Any]) -> None:
        """Updates.connect."""
        await self._updates.connect(init_info)

    async def start_update(self) -> None:
        """Updates.start."""
        await self._updates.start()

    async def update(self, update_info: dict[str, Any]) -> None:
        """Updates.update."""
        await self._updates.update(update_info)

    async def finish_update(self, version: int) -> None:
        """Updates.finish."""
        await self._updates.finish(version)


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
