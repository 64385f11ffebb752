"""What vLLM's workers get from us (--worker-extension-cls):
a weight session, called by the middleware through collective_rpc."""

from __future__ import annotations

from typing import Any

from engine.errors import BadInput, DeadlineError, MetronomeError, TransferError
from engine.instance.vllm.session import OutOfOrder, WeightSession


class WorkerExtension:
    """Becomes a base class of vLLM's worker, so every name it adds begins with `metronome`."""

    _metronome_session: WeightSession | None = None

    def metronome(self, action: str, argument: Any = None) -> dict[str, Any]:  # noqa: ANN401
        """`action` is a method of WeightSession. Gives {"result": …}, or {"error": …, "status": …} where it refused or
        failed.

        Errors are returned, not raised: vLLM would end the engine for some, and lose the message of others.
        """
        if self._metronome_session is None:
            self._metronome_session = WeightSession(self)
        act = getattr(self._metronome_session, action)
        try:
            return {"result": act() if argument is None else act(argument)}
        except MetronomeError as error:
            return {"error": str(error), "kind": type(error).__name__, "status": _status(error)}


def _status(error: MetronomeError) -> int:
    """400: what was sent is wrong; 409: it came at the wrong time; 503: the transfer failed and may be tried again."""
    if isinstance(error, (TransferError, DeadlineError)):
        return 503
    return 400 if isinstance(error, BadInput) else 409 if isinstance(error, OutOfOrder) else 500
