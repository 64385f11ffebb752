"""The embedded engine behind the HTTP routes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity

from engine.errors import BadInput
from engine.instance.embedded.engine import Engine
from engine.instance.embedded.engine_thread import EngineThread
from engine.instance.embedded.sampling import Sampling
from engine.instance.embedded.updates import Updates
from engine.instance.protocol import Completion, RequestLimits
from engine.instance.refusals import NO_PROFILES, Conflict
from engine.instance.replies import Result
from engine.platform.base import torch_profiler


class EmbeddedBackend(Updates):
    """A Backend that calls the engine in its thread. Its base class has the weight updates."""

    world_size = 1

    def __init__(self, worker: EngineThread, limits: RequestLimits, model: str, profile: Path | None = None) -> None:
        """`profile`: the file that a profile is written to, without the ending .json.gz; None: there is none."""
        super().__init__(worker, Path(model))
        self._profile = profile
        self._recording: Any = None
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

    async def start_profile(self) -> None:
        """Have torch's profiler record the engine's thread."""
        if self._profile is None:
            raise BadInput(NO_PROFILES)
        if self._recording is not None:
            raise Conflict("a profile is being recorded already; send /stop_profile first")
        self._recording = torch_profiler(self._profile.parent, self._profile.name, [ProfilerActivity.CPU])
        await self._worker.call(lambda engine: self._recording.start())

    async def stop_profile(self) -> None:
        """Write what was recorded. Nothing is sampled meanwhile."""
        if self._recording is None:
            raise Conflict("no profile is being recorded; send /start_profile first")
        recorded = self._recording
        self._recording = None
        await self._worker.call(lambda engine: recorded.stop())

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
