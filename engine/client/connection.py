"""A stage's connection to the plane: requests to POST /ask of the orchestrator's server, each with a deadline."""

from __future__ import annotations

from typing import cast

import httpx
import msgspec

from engine.errors import DeadlineError, MetronomeError
from engine.run.logs import log_error
from engine.wire.access_token import authorization_headers
from engine.wire.certificate import client_context
from engine.wire.messages import (
    CONTENT_TYPE,
    PROTOCOL,
    PROTOCOL_HEADER,
    TRAIN,
    Answer,
    Failure,
    Request,
    StageFailed,
    pack,
    read_message,
)


class Connection:
    """A connection to one orchestrator. Several threads may use it. HTTP connections stay open between requests."""

    def __init__(
        self,
        url: str,
        token: str | None,
        name: str,
        timeout_s: float,
        certificate: str | None = None,
    ) -> None:
        """`url`: http(s)://host:port. `name`: name of the asking process, for messages. `timeout_s`: seconds to wait
        for a reply. `certificate`: the server's (PEM), with https."""
        self.url = url
        self.timeout_s = timeout_s
        self._name = name
        self._http = httpx.Client(
            headers={
                **authorization_headers(token),
                "Content-Type": CONTENT_TYPE,
                PROTOCOL_HEADER: str(PROTOCOL),
                "Accept-Encoding": "identity",
            },
            verify=client_context(certificate) if certificate is not None else url.startswith("https:"),
            trust_env=False,  # a proxy of this machine does not lead to the orchestrator
            limits=httpx.Limits(keepalive_expiry=None),
        )

    def ask(self, request: Request[Answer]) -> Answer:
        """Send a request and return its reply.

        Raises DeadlineError if no reply arrives in time, MetronomeError if the orchestrator can't be reached, and the
        error with which it answers.
        """
        what = type(request).__name__
        try:
            with self._http.stream("POST", f"{self.url}/ask", content=pack(request), timeout=self.timeout_s) as answer:
                raw = b"" if "Content-Encoding" in answer.headers else answer.read()  # it could become any size
        except httpx.TimeoutException:
            raise DeadlineError(
                f"{self._name}: no answer from the orchestrator at {self.url} to {what} in {self.timeout_s:.0f} s"
            ) from None
        except httpx.TransportError as error:
            raise MetronomeError(f"{self._name}: the orchestrator at {self.url} can't be reached: {error}") from None
        try:
            reply = read_message(raw)
        except msgspec.DecodeError:
            raise MetronomeError(
                f"{self._name}: {self.url} answered {answer.status_code} to {what}, but not with a message of the plane"
            ) from None
        if isinstance(reply, Failure):
            raise reply.error()
        return cast(Answer, reply)

    def tell_failure(self, error: MetronomeError, stage: str = TRAIN) -> None:
        """Tell the plane that a stage ends with this error. Raises nothing: if the orchestrator is gone, this process's
        log has the error."""
        try:
            self.ask(StageFailed(error=Failure.of(error), stage=stage))
        except MetronomeError as unheard:
            log_error(f"{self._name} ends: {error} (the orchestrator was not told: {unheard})")

    def close(self) -> None:
        """Close the connections. Requests in progress end."""
        self._http.close()
