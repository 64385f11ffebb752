"""Addresses: host and port in text and URLs, and the address at which instances join a run.

This module imports only the standard library and engine.errors, because vLLM's environment imports it too.
"""

from __future__ import annotations

import socket
from pathlib import Path

from engine.errors import BadInput

ADDRESS_FILE = "rollout.address"
"""File in the run folder with the host:port at which instances join (engine.orchestrator.server)."""

AUTO = "auto"
"""The host of an address that stands for this machine's own one."""
ELSEWHERE = "192.0.2.1"
"""An address that no machine has (RFC 5737); the way to it is the default route."""


def bracket_host(host: str) -> str:
    """Return the host as a URL writes it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def http_url(host: str, port: int) -> str:
    """Return http://host:port."""
    return f"http://{bracket_host(host)}:{port}"


def split_address(text: str, key: str) -> tuple[str, int]:
    """Return (host, port) of "host:port". The host "auto" is this machine's address on the default route. Raises
    BadInput, which names `key`, for any other text, and for "auto" on a machine without a network."""
    host, colon, port = text.strip().rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 2**16):
        raise BadInput(f"{key} = {text.strip()!r}: expected host:port, for example 127.0.0.1:8000")
    if host != AUTO:
        return host.strip("[]"), int(port)
    try:
        return address_towards(ELSEWHERE), int(port)
    except OSError:
        raise BadInput(f"{key} = {text.strip()!r}: this machine has no default route; give its address") from None


def known_address(text: str, key: str) -> str:
    """Return the host:port that other machines may be given for an address (`split_address`)."""
    host, port = split_address(text, key)
    return f"{bracket_host(host)}:{port}"


def reachable_host(host: str) -> str:
    """Return the address at which other machines reach a server that listens on `host`.

    For 0.0.0.0 and :: this is the machine's IPv4 address on the default route, or 127.0.0.1 without a network.
    """
    if host not in ("0.0.0.0", "::"):
        return host
    try:
        return address_towards(ELSEWHERE)
    except OSError:
        return "127.0.0.1"


def address_towards(peer: str, port: int = 9) -> str:
    """Return the address from which this machine sends to `peer`. Raises OSError if there is no route to it."""
    with socket.socket(socket.AF_INET6 if ":" in peer else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, port))  # sends nothing
        return str(probe.getsockname()[0])


def orchestrator_address(text: str) -> str:
    """Return host:port of the orchestrator. `text` is host:port, a run folder, or the file rollout.address in one.

    Raises BadInput if there is no host:port, FileNotFoundError if the run is not listening yet.
    """
    path = Path(text).expanduser()
    file = path / ADDRESS_FILE if path.is_dir() else path
    if path.is_dir() or path.name == ADDRESS_FILE:
        text = file.read_text(errors="replace")
    return known_address(text, "--join")
