"""What the launcher of a run on several nodes leaves in the run folder for the other nodes, which must share that
folder.

Ranks reach the launcher's control channel over TCP, encrypted and closed to everybody who does not have its key
(CurveZMQ). The invitation holds the key, so only its owner can read it.
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
"""File in the run folder while its launcher waits for, or has, ranks on other nodes."""
POLL_S = 0.5


def control_address(config: Config) -> str:
    """Where ranks of all nodes reach the launcher: the port after the rendezvous's."""
    host, port = split_address(config.parallel.rendezvous, "parallel.rendezvous")
    return f"tcp://{host}:{port + 1}"


def invite(config: Config, folder: Path, run_id: str, arguments: Sequence[str], key: str) -> None:
    """Leave what the other nodes need. `arguments`: a rank's; `key`: the control channel's public key."""
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
    """The invitation in a run folder, once there is another than the one of the run_id `seen`.

    Raises DeadlineError, and BadInput where the launcher is of another release.
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
            again = "again, after its trainer has ended" if seen else f"in {folder / INVITATION}"
            raise DeadlineError(f"the run did not ask for other nodes within {wait_s:.0f} s {again}")
        time.sleep(POLL_S)


def _check_protocol(invitation: dict[str, Any]) -> None:
    if (theirs := invitation.get("protocol")) != PROTOCOL:
        raise BadInput(
            f"this node speaks version {PROTOCOL} of the control protocol, the run's launcher version {theirs}: "
            "install the same release of Metronome on all nodes"
        )
