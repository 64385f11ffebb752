"""Our extension of vLLM's workers (--worker-extension-cls): a weight session that the backend calls through
collective_rpc."""

from __future__ import annotations

from typing import Any

from engine.errors import MetronomeError
from engine.instance.refusals import as_refusal
from engine.instance.vllm.session import WeightSession


class WorkerExtension:
    """A base class that vLLM adds to its worker, so every name it adds begins with `metronome`."""

    _metronome_session: WeightSession | None = None

    def metronome(self, action: str, argument: Any = None) -> dict[str, Any]:  # noqa: ANN401
        """Call the method `action` of the worker's WeightSession, with at most one argument. Return {"result": …}, or
        {"error": …, "kind": …, "status": …} for a MetronomeError.

        Errors are returned because vLLM ends the engine for some raised errors and loses the message of others.
        """
        if self._metronome_session is None:
            self._metronome_session = WeightSession(self)
        arguments = () if argument is None else (argument,)
        try:
            return {"result": getattr(self._metronome_session, action)(*arguments)}
        except MetronomeError as error:
            refusal = as_refusal(error)
            return {"error": str(error), "kind": refusal.kind, "status": refusal.status}
