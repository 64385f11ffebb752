"""Rollout instances of a run on a work pool of their own: what that pool's worker does (tasks/companions.py asks for them)."""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from engine.config import Config
from engine.errors import DeadlineError
from engine.process import Child, stop_all
from engine.recipe import dump
from engine.rollout.join import default_name, launcher_address
from engine.rollout.registry import split_address
from tasks.console import say

POLL_S = 1.0
STOP_S = 10.0
"""What instances may take to leave the run before they are killed."""


def serve_until_the_run_ends(config: Config, join: str, count: int, host: str) -> None:
    """Start `count` instances that join a run, and end them once its launcher has been away for rollout.wait_s.

    `join`: host:port of the launcher, or the run folder. Raises DeadlineError when no launcher is there for as long at the
    start, ProcessDied when an instance dies while the run goes on.
    """
    with tempfile.TemporaryDirectory(prefix="metronome-") as scratch:
        recipe = Path(scratch) / "config.toml"
        dump(config, recipe)
        children = [_instance(recipe, join, host, f"{default_name()}-{number}") for number in range(count)]
        try:
            _accompany(children, join, config.rollout.wait_s)
        finally:
            stop_all(children, STOP_S)


def _instance(recipe: Path, join: str, host: str, name: str) -> Child:
    log = recipe.parent / f"{name}.log"
    command = [sys.executable, "-m", "flows.cli", "serve", str(recipe), "--join", join, "--host", host, "--name", name]
    return Child(f"rollout instance {name}", command, log)


def _accompany(children: Sequence[Child], join: str, wait_s: float) -> None:
    met, heard = False, time.monotonic()
    while True:
        if _answers(join):
            if not met:
                say("rollouts", f"{len(children)} instances join the run at {join}")
            met, heard = True, time.monotonic()
            for child in children:
                child.check()
        elif time.monotonic() - heard > wait_s:
            break
        time.sleep(POLL_S)
    if not met:
        raise DeadlineError(f"no launcher answers at {join} within {wait_s:.0f} s (rollout.wait_s): has the run begun?")
    say("rollouts", f"the run at {join} has ended")


def _answers(join: str) -> bool:
    """Whether a launcher listens there now."""
    try:
        socket.create_connection(split_address(launcher_address(join), "join"), timeout=5.0).close()
    except OSError:  # not there, or a run folder without the file yet
        return False
    return True
