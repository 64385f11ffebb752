"""How a request is refused: the status and the kind of error that its reply carries, the same for both engines.

Standard library and engine.errors only: it also runs in vLLM's environment.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import BadInput, DeadlineError, MetronomeError, TransferError

KINDS = {
    400: "BadRequestError",
    401: "UnauthorizedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestEntityTooLargeError",
    429: "TooManyRequestsError",
    500: "InternalServerError",
}


class Conflict(MetronomeError):
    """The call is right in itself but not now: an update out of order, a resume in the middle of one."""


class Refusal(MetronomeError):
    """A reply with this status, the error's message and these headers."""

    def __init__(
        self, status: int, message: str, kind: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """`kind`: that of the status (KINDS) unless given."""
        super().__init__(message)
        self.status = status
        self.kind = kind or KINDS[status]
        self.headers = headers or {}


def as_refusal(error: MetronomeError) -> Refusal:
    """400: what was sent is wrong; 409: it came at the wrong time; 503: a transfer failed and may be tried again;
    500: anything else."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, (TransferError, DeadlineError)):
        return Refusal(503, str(error), type(error).__name__)
    return Refusal(400 if isinstance(error, BadInput) else 409 if isinstance(error, Conflict) else 500, str(error))
