"""Trainer ranks on nodes other than the orchestrator's: `python -m engine.trainer.ranks.nodes RUN_FOLDER`.

All nodes must share the run folder. The orchestrator writes an invitation into it (engine.wire.invitation). Each other
node reads it and starts its ranks under its own elastic agent; all agents meet at `parallel.rendezvous`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from engine.errors import MetronomeError
from engine.run.commands import rank_defaults
from engine.run.logs import log_error
from engine.run.process import LIFELINE, hold_lifeline, watch_lifeline
from engine.wire.access_token import VARIABLE as TOKEN
from engine.wire.certificate import CERTIFICATE
from engine.wire.invitation import Invitation, wait_for_invitation


def follow_invitations(folder: Path, wait_s: float) -> None:
    """Run this node's ranks of a run until training ends, once per invitation: a resumed run writes a new one.

    Raises DeadlineError if no new invitation arrives within `wait_s` seconds.
    """
    seen = ""
    while True:
        invitation = wait_for_invitation(folder, seen, wait_s)
        seen = invitation.run_id
        if _run_invited_ranks(invitation) == 0:
            return


def _run_invited_ranks(invitation: Invitation) -> int:
    from engine.trainer.ranks.agent import run_ranks  # imports torch, which takes seconds

    os.environ |= {
        TOKEN: invitation.token,
        CERTIFICATE: invitation.certificate,
        "OMP_NUM_THREADS": str(invitation.threads),
        **rank_defaults(invitation.tensor, invitation.transport),
    }
    return run_ranks(
        ranks=invitation.ranks,
        arguments=invitation.arguments,
        nodes=invitation.nodes,
        rendezvous=invitation.rendezvous,
        run_id=invitation.run_id,
        serves=False,
    )


def main() -> int:
    """Return 0 once the run has been trained; else print the error and return 1."""
    watch_lifeline()
    os.environ[LIFELINE] = hold_lifeline()
    parser = argparse.ArgumentParser(description="this node's trainer ranks of a run")
    parser.add_argument("folder", type=Path, help="the run folder, shared with the orchestrator's node")
    parser.add_argument("--wait", type=float, default=600.0, help="seconds to wait for the run to start or restart")
    arguments = parser.parse_args()
    try:
        follow_invitations(arguments.folder, arguments.wait)
    except MetronomeError as error:
        log_error(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
