"""What the HTTP routes need of an engine."""

from __future__ import annotations

from typing import Any, Protocol

from engine.instance.protocol import Completion, RequestLimits
from engine.instance.replies import Result


class Backend(Protocol):
    """An engine behind the routes (docs/protocol.md). Requests are checked before; what a method refuses (BadInput,
    Conflict) has had no effect. `complete` is cancelled when its client leaves, everything else runs to its end."""

    model: str
    """The folder it was loaded from."""
    limits: RequestLimits
    world_size: int
    """Processes that take part in a weight transfer."""

    async def complete(self, asked: Completion) -> Result:
        """Sample one response; waits while the instance is paused."""

    async def check_health(self) -> None:
        """Raise where the engine is dead."""

    async def weight_version(self) -> int:
        """The version of the last finished update; 0 for the weights from disk."""

    async def load(self) -> dict[str, int]:
        """`running` and `waiting` responses, `prefills` (prompts computed from their first token) and
        `generated_tokens` since the start, `weight_version`."""

    async def metrics(self) -> bytes:
        """The engine's own metrics, in Prometheus' text format."""

    async def pause(self, abort: bool) -> None:
        """Admit nothing from now on; returns once nothing runs. `abort` ends every request, waiting ones too, with the
        tokens it has; else the running ones drain."""

    async def resume(self) -> None:
        """Admit again. Conflict while responses drain, and while the weights are not whole."""

    async def reset_prefix_cache(self) -> None:
        """Forget computed prompts."""

    async def connect(self, init_info: dict[str, Any]) -> None:
        """Join the senders' groups (Receiver.connect); calls off a transfer or a connect under way."""

    async def start_update(self) -> None:
        """Begin a weight update, or begin it again. Conflict unless paused and drained."""

    async def update(self, update_info: dict[str, Any]) -> None:
        """Receive and load a bucket, or begin to stage it."""

    async def finish_update(self, version: int) -> None:
        """Name the new weights. Conflict when they are not whole."""
