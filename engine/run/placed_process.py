"""A process of a run on a node of a cluster: the same command as on one machine, held by an actor there.

The actor holds the lifeline (engine.run.process), so the process ends with it, however it ends.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.run.process import Child, python_command
from engine.run.vllm_command import VISIBLE

FOLDER = "{folder}"
"""Stands in a command for the folder with its files on the node."""
HOST = "{host}"
"""Stands in a command for the node's address."""
THREADS = "OMP_NUM_THREADS"
"""Ray sets it to the actor's CPUs; the process gets it from the run instead."""
PIECE = 2**20
"""Most bytes of a log that are sent at a time."""


@dataclass(frozen=True)
class ActorPlace:
    """Where an actor is."""

    node: str
    """Id of the node in the cluster."""
    host: str
    """Address of the node."""
    devices: Mapping[str, str]
    """The variables that make the actor's devices visible, with their values."""
    niceness: int


@dataclass(frozen=True)
class News:
    """What has happened since the last look."""

    code: int | None
    """Exit status, negative for a signal; None while the process runs."""
    log: bytes
    """What it has printed."""


class PlacedProcess:
    """The process, as the actor has it. It gets the actor's environment, in which the cluster shows it its devices."""

    def __init__(self, node: str, host: str) -> None:
        self._place = ActorPlace(
            node=node,
            host=host,
            devices={name: os.environ[name] for name in VISIBLE.values() if os.environ.get(name)},
            niceness=os.nice(0),
        )
        self._folder = Path(tempfile.mkdtemp(prefix="metronome-"))
        self._child: Child | None = None
        self._read = 0

    def place(self) -> ActorPlace:
        """Where it is."""
        return self._place

    def start(
        self, module: str, arguments: Sequence[str], files: Mapping[str, str], environment: Mapping[str, str]
    ) -> ActorPlace:
        """Start a module with `arguments`, in which FOLDER and HOST are replaced. `files`: texts by the names that they
        get in FOLDER. `environment` is added to the node's own."""
        for name, text in files.items():
            (self._folder / name).write_text(text)
        filled = [one.replace(FOLDER, str(self._folder)).replace(HOST, self._place.host) for one in arguments]
        inherited = {name: value for name, value in os.environ.items() if name != THREADS}
        self._child = Child(
            name=module,
            arguments=python_command(module, *filled),
            log=self._folder / "log",
            env=environment,
            inherited=inherited,
        )
        return self._place

    def look(self) -> News:
        """What has happened since the last look."""
        assert self._child is not None, "start comes first"
        code = self._child.process.poll()
        with (self._folder / "log").open("rb") as log:
            log.seek(self._read)
            piece = log.read(PIECE)
        self._read += len(piece)
        return News(code if len(piece) < PIECE else None, piece)

    def stop(self, grace_s: float) -> None:
        """End the process: SIGTERM, and SIGKILL after `grace_s` seconds."""
        if self._child is not None:
            self._child.stop(grace_s)
        shutil.rmtree(self._folder, ignore_errors=True)
