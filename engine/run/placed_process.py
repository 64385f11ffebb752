"""A process of a run on a node of a cluster: the same command as on one machine, held by an actor there.

The actor holds the lifeline (engine.run.process), so the process ends with it, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.run.process import Child, hold_lifeline, python_command
from engine.run.vllm_command import VISIBLE

FOLDER = "{folder}"
"""Stands in a command for the folder with its files on the node."""
HOST = "{host}"
"""Stands in a command for the node's address."""
THREADS = "OMP_NUM_THREADS"
"""Ray sets it to the actor's CPUs; the process gets it from the run instead."""
PIECE = 2**20
"""Most bytes of a log that are sent at a time."""
KEPT = 16 * PIECE
"""Most bytes of a log that a node keeps for a run that does not fetch them. Older ones are dropped."""
CLOSE_S = 5.0
"""Longest time in seconds until a reader of output has ended."""


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


class _PipedOutput:
    """What a process prints into a named pipe, until somebody takes it: nothing of it lies on the node's disk."""

    def __init__(self, pipe: Path) -> None:
        """Make the pipe."""
        os.mkfifo(pipe, 0o600)
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # for writing too, so that it never has an end
        self._kept = bytearray()
        self._dropped = 0
        """Number of bytes that were dropped since the last `take`."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read_on, name="output", daemon=True)
        self._thread.start()

    def _read_on(self) -> None:
        while not self._closed.is_set():
            select.select([self._pipe], [], [], 1.0)
            with self._lock:
                self._read()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._kept += os.read(self._pipe, PIECE)
                over = max(0, len(self._kept) - KEPT)
                del self._kept[:over]
                self._dropped += over

    def take(self, most: int) -> tuple[bytes, bool]:
        """What was printed and not yet taken, up to `most` bytes, and whether there is more."""
        with self._lock:
            self._read()
            piece = bytes(self._kept[:most])
            del self._kept[:most]
            if self._dropped:
                piece = f"... {self._dropped} bytes of this log were not fetched in time ...\n".encode() + piece
                self._dropped = 0
            return piece, bool(self._kept)

    def close(self) -> None:
        """End the reading, and close the pipe."""
        self._closed.set()
        with contextlib.suppress(BlockingIOError):
            os.write(self._pipe, b"\n")  # wakes the reader
        self._thread.join(CLOSE_S)
        os.close(self._pipe)


class PlacedProcess:
    """The process, as the actor has it. It gets the actor's environment, in which the cluster shows it its devices."""

    def __init__(self, node: str, host: str) -> None:
        self._place = ActorPlace(
            node=node,
            host=host,
            devices={name: os.environ[name] for name in VISIBLE.values() if os.environ.get(name)},
            niceness=os.nice(0),
        )
        # beside the lifeline, where a later process removes it if this one is killed
        self._folder = Path(tempfile.mkdtemp(dir=Path(hold_lifeline()).parent))
        self._output = _PipedOutput(self._folder / "log")
        self._child: Child | None = None

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
        piece, more = self._output.take(PIECE)
        return News(None if more else code, piece)

    def stop(self, grace_s: float) -> bytes:
        """End the process: SIGTERM, and SIGKILL after `grace_s` seconds. Returns what it has printed since the last
        look. Nothing may be asked after this."""
        if self._child is not None:
            self._child.stop(grace_s)
        printed, _ = self._output.take(KEPT)
        self._output.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return printed
