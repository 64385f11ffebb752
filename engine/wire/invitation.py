"""The invitation: a file that the launcher writes for the other nodes of a run, which must share the run folder.

Ranks reach the launcher's control channel over TCP. It is encrypted, and it refuses peers without its key (CurveZMQ).
The invitation holds the key, so only the file's owner can read it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.errors import BadInput, DeadlineError
from engine.run.files import write_atomically
from engine.wire.address import split_address
from engine.wire.messages import PROTOCOL

INVITATION = "trainer_nodes.json"
"""File in the run folder. It is there while the launcher waits for ranks on other nodes, or has them."""
POLL_S = 0.5
"""Seconds between two looks for the invitation."""


def control_address(config: Config) -> str:
    """Return the address at which ranks of all nodes reach the launcher: the port after that of the rendezvous."""
    host, port = split_address(config.parallel.rendezvous, "parallel.rendezvous")
    return f"tcp://{host}:{port + 1}"


def invite(config: Config, folder: Path, run_id: str, arguments: Sequence[str], key: str) -> None:
    """Write the invitation. `arguments`: command-line arguments of a rank; `key`: the control channel's public key."""
    row = {
        "protocol": PROTOCOL,
        "run_id": run_id,
        "rendezvous": config.parallel.rendezvous,
        "nodes": config.parallel.nodes,
        "ranks": config.parallel.ranks_per_node,
        "arguments": list(arguments),
        "key": key,
        "threads": config.trainer_threads,
    }
    before = os.umask(0o077)
    try:
        write_atomically(folder / INVITATION, json.dumps(row))
    finally:
        os.umask(before)


def wait_for_invitation(folder: Path, seen: str, wait_s: float) -> dict[str, Any]:
    """Wait for the invitation in a run folder and return it; one with the run_id `seen` does not count.

    Raises DeadlineError after `wait_s` seconds, BadInput if the launcher has another version of the protocol.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            found: dict[str, Any] = json.loads((folder / INVITATION).read_text())
            if found["run_id"] != seen:
                _check_protocol(found)
                return found
        except FileNotFoundError:
            pass
        if time.monotonic() > deadline:
            since = " after its last trainer ended" if seen else ""
            raise DeadlineError(
                f"{folder / INVITATION}: the run did not ask for other nodes within {wait_s:.0f} s{since}"
            )
        time.sleep(POLL_S)


def _check_protocol(invitation: dict[str, Any]) -> None:
    if (theirs := invitation.get("protocol")) != PROTOCOL:
        raise BadInput(
            f"this node speaks version {PROTOCOL} of the control protocol, the run's launcher version {theirs}: "
            "install the same release of Metronome on all nodes"
        )
