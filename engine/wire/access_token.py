"""Who may use a run's servers, the orchestrator and the instances of both engines: the access token, and where a
request comes from.

This module imports only the standard library and engine.errors, because vLLM's environment imports it too.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from engine.errors import BadInput
from engine.wire.address import ADDRESS_FILE

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
    return _check_token(VARIABLE, os.environ.get(VARIABLE, ""))


def _check_token(place: str | Path, token: str) -> str | None:
    if token and not (token.isascii() and token.isprintable() and token == token.strip()):
        raise BadInput(f"{place}: it must be printable ASCII without spaces around it, as from `openssl rand -hex 32`")
    return token or None


def own_token() -> str:
    """Return the token in this process's environment, or a new one. Raises BadInput as `access_token` does."""
    return access_token() or secrets.token_hex(32)


def folder_token(address: str) -> str | None:
    """Return the token with which a program reaches the orchestrator at `address`: host:port, a run folder, or the file
    rollout.address in one. Without a file beside the address it is that of the environment. Raises BadInput as
    `access_token` does."""
    path = Path(address).expanduser()
    file = (path if path.is_dir() else path.parent) / TOKEN_FILE
    local = path.is_dir() or path.name == ADDRESS_FILE
    there = local and file.exists()
    return _check_token(file, file.read_text(errors="replace")) if there else access_token()


def authorization_headers(token: str | None) -> dict[str, str]:
    """Return the HTTP headers with which a client sends the token; empty without a token."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def is_authorized(header: str | bytes | None, token: str) -> bool:
    """Whether an Authorization header (None: the request has none) carries the token. The comparison takes constant
    time."""
    given = header.encode("utf-8", "surrogateescape") if isinstance(header, str) else header or b""
    scheme, _, credentials = given.partition(b" ")
    return hmac.compare_digest(credentials.strip(), token.encode()) and scheme.lower() == b"bearer"


def refuse_source(headers: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the status and the reason with which every server refuses a request; None if it accepts where the request
    comes from. `headers`: found by their lower-case names.

    A browser may send requests for the page of a stranger. It then names that page (Origin, Sec-Fetch-Site), or, if
    the stranger's host name was made to lead here (DNS rebinding), that host name. No page can be served from an IP
    address that is not its own. Compressed bodies are refused because their size is not known before they are read.
    """
    host = headers.get("host", "localhost").strip().lower()
    name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    if not (name == "localhost" or name == socket.gethostname().lower() or _is_ip(name)):
        return 403, f"Host {host!r:.100}: reach this server by its IP address, localhost or the name of its machine"
    site = headers.get("sec-fetch-site", "none")
    if "origin" in headers or site not in ("none", "same-origin"):
        return 403, "a web page sent this request (Origin, Sec-Fetch-Site); this server takes none from pages"
    if (coding := headers.get("content-encoding", "identity")) != "identity":
        return 415, f"Content-Encoding {coding!r:.100}: send the body uncompressed"
    return None


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


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
