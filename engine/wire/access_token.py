"""The access token of a run's servers: the orchestrator and the instances of both engines.

This module imports only the standard library and engine.errors, because vLLM's environment imports it too.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from pathlib import Path

from engine.errors import BadInput

VARIABLE = "METRONOME_TOKEN"
"""Environment variable with the token, read by servers and their clients."""
TOKEN_FILE = "rollout.token"
"""File in the run folder with the token that programs send to the orchestrator; only its owner can read it."""


def write_token(file: Path, token: str) -> None:
    """Write a token into a file that only its owner can read."""
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(token)
    partial.replace(file)


def access_token() -> str | None:
    """Return the token in this process's environment; None if it is unset or empty.

    Raises BadInput if no HTTP header can carry it.
    """
    token = os.environ.get(VARIABLE, "")
    if token and not (token.isascii() and token.isprintable() and token == token.strip()):
        raise BadInput(
            f"{VARIABLE}: it must be printable ASCII without spaces around it, as from `openssl rand -hex 32`"
        )
    return token or None


def authorization_headers(token: str | None) -> dict[str, str]:
    """Return the HTTP headers with which a client sends the token; empty without a token."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def is_authorized(header: str | bytes | None, token: str | None) -> bool:
    """Whether an Authorization header (None: the request has none) carries the token. The comparison takes constant
    time.

    Without a token every request is authorized, because the server then listens on loopback only (check_address).
    """
    if token is None:
        return True
    given = header.encode("utf-8", "surrogateescape") if isinstance(header, str) else header or b""
    scheme, _, credentials = given.partition(b" ")
    return hmac.compare_digest(credentials.strip(), token.encode()) and scheme.lower() == b"bearer"


def check_address(host: str, token: str | None, key: str = "--host") -> None:
    """Raise BadInput, which names `key`, unless `host` is an IP address or localhost. Without a token it must be a
    loopback address."""
    try:
        loopback = is_loopback(host)
    except ValueError:
        raise BadInput(f"{key} {host}: expected an IP address, for example 127.0.0.1") from None
    if not loopback and token is None:
        raise BadInput(
            f"{key} {host}: only loopback addresses such as 127.0.0.1 are served without an access token; "
            f"set {VARIABLE}, the same for the orchestrator and its instances, to listen elsewhere"
        )


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` is reachable from this machine only. Raises ValueError unless it is an IP
    address or localhost."""
    return host == "localhost" or ipaddress.ip_address(host).is_loopback
