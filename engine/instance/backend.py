"""The interface through which the HTTP routes use an engine."""

from __future__ import annotations

from typing import Protocol

from engine.instance.protocol import Completion, RequestLimits
from engine.instance.replies import Result
from engine.types import JsonObject


class Backend(Protocol):
    """An engine behind the routes (docs/protocol.md). The routes check completions before they call it.

    A method that raises BadInput or Conflict has changed nothing, except that a weight update may have ended.
    `complete` is cancelled when its client disconnects; every other call runs to its end.
    """

    model: str
    """The folder that the model was loaded from."""
    limits: RequestLimits
    world_size: int
    """Processes that take part in a weight transfer."""

    async def complete(self, asked: Completion) -> Result:
        """Sample one response. Wait while the instance is paused. Raise Conflict after a weight update that failed
        half-way."""

    async def check_health(self) -> None:
        """Raise an error if the engine is dead."""

    async def load(self) -> dict[str, int]:
        """Return the numbers of `running` and `waiting` responses, of `prefills` (prompts computed from their first
        token) and of `generated_tokens` since the start, and the `weight_version`."""

    async def metrics(self) -> bytes:
        """Return the engine's own metrics in Prometheus's text format."""

    async def pause(self, abort: bool) -> None:
        """Stop admitting requests, and return once nothing runs. With `abort` every request, including waiting ones,
        ends with the tokens it has; otherwise the running ones finish."""

    async def resume(self) -> None:
        """Admit requests again. Raise Conflict while responses drain, and while the weights are incomplete."""

    async def reset_prefix_cache(self) -> None:
        """Drop the cached prompts."""

    async def start_profile(self) -> None:
        """Start recording a profile in the folder of --profile. Raise BadInput if the instance was started without that
        option, and Conflict if it is already recording."""

    async def stop_profile(self) -> None:
        """Write the profile. Raise Conflict if none is being recorded."""

    async def connect(self, init_info: JsonObject) -> None:
        """Join the senders' groups (Receiver.connect). Cancel a transfer or a connect in progress."""

    async def start_update(self) -> None:
        """Begin a weight update, or restart it. Raise Conflict unless paused and drained."""

    async def update(self, update_info: JsonObject) -> None:
        """Receive and load a bucket, or begin to stage it."""

    async def finish_update(self, version: int) -> int:
        """Give the new weights their version, and return the version that the processes with the weights say. Raise
        Conflict if the weights are incomplete."""

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """Return the log-probabilities of the tokens except the first, at temperature 1. Called while paused."""
