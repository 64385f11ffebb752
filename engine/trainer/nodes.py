"""Trainer ranks on several nodes: what the launcher leaves for the others, and `python -m engine.trainer.nodes RUN_FOLDER` there.

The run folder must be shared. The launcher writes an invitation into it; each other node reads it, starts its ranks under an
elastic agent of its own, and all agents meet at `parallel.rendezvous`. Ranks reach the launcher's control channel over TCP,
encrypted and closed to everybody who does not have its key (CurveZMQ), which the invitation holds: only its owner can read it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.errors import DeadlineError, MetronomeError
from engine.process import LIFELINE, hold_lifeline, watch_lifeline
from engine.queue.keys import CONTROL_KEY
from engine.rollout.registry import split_address
from engine.run_folder import write_atomically

INVITATION = "trainer_nodes.json"
"""File in the run folder while its launcher waits for, or has, ranks on other nodes."""
POLL_S = 0.5


def control_address(config: Config) -> str:
    """Where ranks of all nodes reach the launcher: the port after the rendezvous's."""
    host, port = split_address(config.parallel.rendezvous, "parallel.rendezvous")
    return f"tcp://{host}:{port + 1}"


def invite(config: Config, folder: Path, run_id: str, arguments: Sequence[str], key: str) -> None:
    """Leave what the other nodes need. `arguments`: a rank's; `key`: the control channel's public key."""
    row = {"run_id": run_id, "rendezvous": config.parallel.rendezvous, "nodes": config.parallel.nodes,
           "ranks": config.parallel.ranks_per_node, "arguments": list(arguments), "key": key,
           "threads": config.trainer_threads}  # fmt: skip
    before = os.umask(0o077)
    try:
        write_atomically(folder / INVITATION, json.dumps(row))
    finally:
        os.umask(before)


def take_part(folder: Path, wait_s: float) -> None:
    """Run this node's ranks of a run until it has trained; again for each attempt, when the run is resumed.

    Raises DeadlineError when there is no invitation that this node has not followed for `wait_s` seconds.
    """
    seen = ""
    while True:
        invitation = _invitation(folder, seen, wait_s)
        seen = invitation["run_id"]
        if _follow(invitation) == 0:
            return


def _invitation(folder: Path, seen: str, wait_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            found: dict[str, Any] = json.loads((folder / INVITATION).read_text())
            if found["run_id"] != seen:
                return found
        except FileNotFoundError:
            pass
        if time.monotonic() > deadline:
            again = "again, after its trainer has ended" if seen else f"in {folder / INVITATION}"
            raise DeadlineError(f"the run did not ask for other nodes within {wait_s:.0f} s {again}")
        time.sleep(POLL_S)


def _follow(invitation: dict[str, Any]) -> int:
    from engine.trainer.elastic import run_ranks  # imports torch: seconds

    os.environ |= {CONTROL_KEY: invitation["key"], "OMP_NUM_THREADS": str(invitation["threads"])}
    rendezvous = invitation["rendezvous"]
    address = _own_address(*split_address(rendezvous, "rendezvous"))
    return run_ranks(invitation["ranks"], invitation["arguments"], invitation["nodes"], rendezvous, invitation["run_id"], address,
                     host=False)  # fmt: skip


def _own_address(host: str, port: int) -> str:
    """The address of the interface that leads to a host; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def main() -> int:
    """0 when the run has trained, 1 with the reason when not."""
    watch_lifeline()
    os.environ[LIFELINE] = hold_lifeline()
    parser = argparse.ArgumentParser(description="this node's trainer ranks of a run")
    parser.add_argument("folder", type=Path, help="the run folder, shared with the launcher's node")
    parser.add_argument("--wait", type=float, default=600.0, help="seconds to wait for the run to begin, or to begin again")
    arguments = parser.parse_args()
    try:
        take_part(arguments.folder, arguments.wait)
    except MetronomeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
