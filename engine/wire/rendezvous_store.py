"""torch's key-value store, served on one address only."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist


def serve_store(host: str, timeout_s: float, port: int = 0) -> dist.TCPStore:
    """Return a store that listens on this address only; port 0 means any free port. Raises OSError if it can't.

    By default torch would listen on all addresses, and spend seconds on resolving the names of mapped addresses.
    """
    listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return dist.TCPStore(
        host_name=host,
        port=int(listening.getsockname()[1]),
        world_size=None,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
