"""Errors as replies: the HTTP status and error type of a refused request, shared by both engines.

It needs only the standard library and engine.errors, since it also runs in vLLM's environment.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import BadInput, DeadlineError, MetronomeError, TransferError

KINDS = {
    400: "BadRequestError",
    401: "UnauthorizedError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestEntityTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "TooManyRequestsError",
    500: "InternalServerError",
}


NO_PROFILES = "this instance was not started to record profiles (train.profile of the run that starts it, or --profile)"


class Conflict(MetronomeError):
    """The call is valid, but not now: for example an update step out of order, or a resume during an update."""


class Refusal(MetronomeError):
    """An error that becomes a reply with this status, message and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`kind`: error type in the reply; by default that of the status in KINDS."""
        super().__init__(message)
        self.status = status
        self.kind = kind or KINDS[status]
        self.headers = headers or {}


def as_refusal(error: MetronomeError) -> Refusal:
    """Return the reply to an error. 400: the request is wrong. 409: the call is out of order. 503: a transfer failed
    and may be retried. 500: anything else."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, (TransferError, DeadlineError)):
        return Refusal(503, str(error), type(error).__name__)
    return Refusal(400 if isinstance(error, BadInput) else 409 if isinstance(error, Conflict) else 500, str(error))
