"""Addresses: host and port in text and URLs, and the address at which instances join a run.

This module imports only the standard library and engine.errors, because vLLM's environment imports it too.
"""

from __future__ import annotations

import socket
from pathlib import Path

from engine.errors import BadInput

ADDRESS_FILE = "rollout.address"
"""File in the run folder with the host:port at which instances join (engine.orchestrator.server)."""


def bracket_host(host: str) -> str:
    """Return the host as a URL writes it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def http_url(host: str, port: int) -> str:
    """Return http://host:port."""
    return f"http://{bracket_host(host)}:{port}"


def split_address(text: str, key: str) -> tuple[str, int]:
    """Return (host, port) of "host:port". Raises BadInput, which names `key`, for any other text."""
    host, colon, port = text.strip().rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 2**16):
        raise BadInput(f"{key} = {text.strip()!r}: expected host:port, for example 127.0.0.1:8000")
    return host.strip("[]"), int(port)


def reachable_host(host: str) -> str:
    """Return the address at which other machines reach a server that listens on `host`.

    For 0.0.0.0 and :: this is the machine's IPv4 address on the default route, or 127.0.0.1 without a network.
    """
    if host not in ("0.0.0.0", "::"):
        return host
    try:
        return address_towards("192.0.2.1")
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
    host, port = split_address(text, "--join")
    return f"{bracket_host(host)}:{port}"
