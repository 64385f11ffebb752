"""What vLLM's workers get from us (--worker-extension-cls):
a weight session, called by the backend through collective_rpc."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.errors import MetronomeError
from engine.instance.refusals import as_refusal
from engine.instance.vllm.session import WeightSession

ACTIONS: dict[str, Callable[..., Any]] = {
    "state": WeightSession.state,
    "begin": WeightSession.begin,
    "poll": WeightSession.poll,
    "start": WeightSession.start,
    "stage": WeightSession.stage,
    "finish": WeightSession.finish,
    "abort": WeightSession.abort,
}
"""What the backend asks for; each takes the session and at most one argument."""


class WorkerExtension:
    """Becomes a base class of vLLM's worker, so every name it adds begins with `metronome`."""

    _metronome_session: WeightSession | None = None

    def metronome(self, action: str, argument: Any = None) -> dict[str, Any]:  # noqa: ANN401
        """Gives {"result": …}, or {"error": …, "kind": …, "status": …} where the session refused or failed.

        Errors are returned, not raised: vLLM would end the engine for some, and lose the message of others.
        """
        if self._metronome_session is None:
            self._metronome_session = WeightSession(self)
        arguments = () if argument is None else (argument,)
        try:
            return {"result": ACTIONS[action](self._metronome_session, *arguments)}
        except MetronomeError as error:
            refusal = as_refusal(error)
            return {"error": str(error), "kind": refusal.kind, "status": refusal.status}
