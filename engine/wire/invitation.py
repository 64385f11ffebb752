"""The invitation: a file that the orchestrator writes for the other nodes of a run, which must share the run folder.

Ranks reach the orchestrator's server over TLS. The invitation contains its certificate, the only one they trust, and
the token that it requires, so only the file's owner can read it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.config import Config
from engine.errors import BadInput, DeadlineError
from engine.run.files import write_atomically
from engine.wire.address import known_address
from engine.wire.messages import PROTOCOL

INVITATION = "trainer_nodes.json"
"""File in the run folder. It exists while the orchestrator waits for, or has, ranks on other nodes."""
POLL_S = 0.5
"""Seconds between two checks for the invitation."""


class _Version(msgspec.Struct):
    """The fields that the invitations of all releases have."""

    run_id: str
    protocol: int | None = None


class Invitation(msgspec.Struct):
    """What another node needs to start its ranks."""

    protocol: int
    run_id: str
    rendezvous: str
    nodes: int
    ranks: int
    """Ranks per node."""
    arguments: list[str]
    """Command-line arguments of a rank."""
    token: str
    """Token that the orchestrator's server requires."""
    certificate: str
    """Certificate (PEM) of the orchestrator's server."""
    threads: int
    """Compute threads per rank."""
    tensor: int
    """Tensor ranks of the layout."""
    transport: str
    """weights.transport of the run."""


def write_invitation(
    config: Config, folder: Path, run_id: str, arguments: Sequence[str], token: str, certificate: str
) -> None:
    """Write the invitation. `arguments`: command-line arguments of a rank. `token`, `certificate`: the ones
    with which a rank reaches the orchestrator's server."""
    invitation = Invitation(
        protocol=PROTOCOL,
        run_id=run_id,
        rendezvous=known_address(config.parallel.rendezvous, "parallel.rendezvous"),
        nodes=config.parallel.nodes,
        ranks=config.parallel.ranks_per_node,
        arguments=list(arguments),
        token=token,
        certificate=certificate,
        threads=config.trainer_threads,
        tensor=config.parallel.tensor,
        transport=config.weights.transport,
    )
    before = os.umask(0o077)
    try:
        write_atomically(folder / INVITATION, msgspec.json.encode(invitation).decode())
    finally:
        os.umask(before)


def wait_for_invitation(folder: Path, seen: str, wait_s: float) -> Invitation:
    """Wait for an invitation in a run folder and return it. One with the run_id `seen` is ignored.

    Raises DeadlineError after `wait_s` seconds, BadInput if the orchestrator has another version of the protocol.
    """
    deadline = time.monotonic() + wait_s
    while True:
        with contextlib.suppress(FileNotFoundError):
            if (found := _read_invitation(folder / INVITATION, seen)) is not None:
                return found
        if time.monotonic() > deadline:
            since = " after its last trainer ended" if seen else ""
            raise DeadlineError(
                f"{folder / INVITATION}: the run did not ask for other nodes within {wait_s:.0f} s{since}"
            )
        time.sleep(POLL_S)


def _read_invitation(file: Path, seen: str) -> Invitation | None:
    data = file.read_bytes()
    try:
        version = msgspec.json.decode(data, type=_Version)
        if version.run_id == seen:
            return None
        if version.protocol == PROTOCOL:
            return msgspec.json.decode(data, type=Invitation)
    except msgspec.DecodeError as error:
        raise BadInput(f"{file}: not an invitation to other nodes ({error})") from None
    raise BadInput(
        f"this node speaks version {PROTOCOL} of the plane's protocol, the run's orchestrator version "
        f"{version.protocol}: install the same release of Metronome on all nodes"
    )
