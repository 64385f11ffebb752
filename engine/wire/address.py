"""Addresses: host and port as people and URLs write them, and the address at which a run's instances join it.

Needs the standard library and engine.errors only: it also runs in vLLM's environment.
"""

from __future__ import annotations

import socket
from pathlib import Path

from engine.errors import BadInput

ADDRESS_FILE = "rollout.address"
"""In the run folder: host:port where instances join (engine.launcher.pool.joining)."""


def bracketed(host: str) -> str:
    """The host as a URL has it: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def http_url(host: str, port: int) -> str:
    """http://host:port."""
    return f"http://{bracketed(host)}:{port}"


def split_address(text: str, key: str) -> tuple[str, int]:
    """(host, port) of "host:port". Raises BadInput, which names `key`."""
    host, colon, port = text.strip().rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 2**16):
        raise BadInput(f"{key} = {text.strip()!r}: expected host:port, for example 127.0.0.1:0")
    return host.strip("[]"), int(port)


def reachable(host: str) -> str:
    """The address under which others reach a server that listens on `host`: for 0.0.0.0 that of the default route."""
    if host not in ("0.0.0.0", "::"):
        return host
    try:
        return address_towards("192.0.2.1")
    except OSError:
        return "127.0.0.1"  # no network


def address_towards(peer: str, port: int = 9) -> str:
    """This machine's own address on the way to a peer. Raises OSError where no way leads there."""
    with socket.socket(socket.AF_INET6 if ":" in peer else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, port))  # sends nothing
        return str(probe.getsockname()[0])


def launcher_address(text: str) -> str:
    """host:port of the launcher: as given, or from a run folder or its rollout.address. Raises BadInput, or
    FileNotFoundError while the run that the folder belongs to has not begun to listen."""
    path = Path(text).expanduser()
    file = path / ADDRESS_FILE if path.is_dir() else path
    if path.is_dir() or path.name == ADDRESS_FILE:
        text = file.read_text()
    host, port = split_address(text, "--join")
    return f"{bracketed(host)}:{port}"
