"""Child processes that never outlive their parent, however it ends (docs/architecture.md).

A parent keeps a named pipe open for writing (its *lifeline*). Every child opens it for reading, and ends its own
process group when the pipe closes. This also works after `kill -9`, and with intermediate processes that close file
descriptors (torch elastic). Grandchildren watch the lifeline of their own parent, so they end as well.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from engine.errors import BadInput, DeadlineError, MetronomeError, ProcessDied
from engine.run.logs import LOGGED, clean_tracebacks, last_message, log_error

LIFELINE = "METRONOME_LIFELINE"
"""Environment variable with the path of the parent's pipe."""

SHARED_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Folder for the pipe and for weights in transfer to the instances; None means the system's temporary folder."""

PREFIX = "metronome-"
"""Prefix of this program's folders there."""
YOUNG_S = 60.0
"""A folder younger than this (seconds) may not have its pipe yet."""

BAD_INPUT = 2
"""Exit code of a process that refuses its input; it would refuse the same input again."""
KILLED_S = 60.0
"""Seconds that a process may take to end after SIGKILL. Writing back tens of GiB of memory takes time."""

_held: tuple[int, str] | None = None
_lock = threading.Lock()


def hold_lifeline() -> str:
    """Open this process's own lifeline (once). Returns its path, for the environment of children."""
    global _held
    with _lock:
        if _held is None:
            sweep_folders(_place())
            folder = tempfile.mkdtemp(prefix=PREFIX, dir=SHARED_MEMORY)
            path = os.path.join(folder, "lifeline")
            os.mkfifo(path, 0o600)
            _held = (os.open(path, os.O_RDWR), path)
            atexit.register(drop_lifeline)
        return _held[1]


def _place() -> Path:
    return Path(SHARED_MEMORY or tempfile.gettempdir())


def sweep_folders(place: Path) -> None:
    """Remove folders that killed processes have left. An orchestrator's folder may hold a whole model in memory."""
    for pipe in place.glob(f"{PREFIX}*/lifeline"):
        try:
            if time.time() - pipe.stat().st_mtime > YOUNG_S and not _is_held(pipe):
                shutil.rmtree(pipe.parent, ignore_errors=True)
        except OSError:  # it belongs to another user, or was just removed
            continue


def _is_held(pipe: Path) -> bool:
    """Whether a process has the named pipe open for reading, as its holder and its watchers do."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno == errno.ENXIO:
            return False
        raise
    return True


def drop_lifeline() -> None:
    """Close this process's lifeline. Every child that watches it ends its process group."""
    global _held
    with _lock:
        if _held is not None:
            os.close(_held[0])
            shutil.rmtree(os.path.dirname(_held[1]), ignore_errors=True)
            _held = None


def watch_lifeline(on_close: Callable[[], None] | None = None) -> None:
    """Begin a process of ours: clean its tracebacks, and watch the parent's lifeline in a thread. When it closes, call
    `on_close` (default: SIGKILL to this process's group).

    Without a lifeline from a parent (a process started by hand) there is nothing to watch.
    """
    clean_tracebacks()
    path = os.environ.get(LIFELINE)
    if path is None:
        return
    end = on_close or _end_group
    threading.Thread(target=_watch, args=(path, end), name="lifeline", daemon=True).start()


def _watch(path: str, end: Callable[[], None]) -> None:
    try:
        pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            if os.read(pipe, 1) == b"":  # no writer: the parent is already dead
                end()
        os.set_blocking(pipe, True)
        while os.read(pipe, 1):
            pass
    except OSError as error:
        if error.errno != errno.ENOENT:  # ENOENT: the parent is gone and its folder removed
            raise
    if Path(path).match(f"{_place()}/{PREFIX}*/lifeline"):  # anything else in the variable is not ours to remove
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)
    end()


def _end_group() -> None:
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class Child:
    """A child process in its own session. The lifeline ends it with this process; its output goes to a log file."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        inherited: Mapping[str, str] | None = None,
    ) -> None:
        """`env`: added to the `inherited` environment, which defaults to that of this process."""
        self.name = name
        self.log = log
        base = os.environ if inherited is None else inherited
        full = {**base, **(env or {}), LIFELINE: hold_lifeline(), **({LOGGED: "1"} if log is not None else {})}
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        output = open(log, "ab") if log is not None else None  # noqa: SIM115
        try:
            self.process = subprocess.Popen(
                list(arguments),
                env=full,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )
        finally:
            if output is not None:
                output.close()

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it, sent by somebody or because the system ran out of memory."""
        return self.process.poll() == -signal.SIGKILL

    @property
    def refused_input(self) -> bool:
        """Whether it ended because it cannot use its input."""
        return self.process.poll() == BAD_INPUT

    def check_alive(self) -> None:
        """If it has ended, raise ProcessDied with how it ended and the end of its log."""
        if not self.alive:
            raise ProcessDied(f"{self.name} {self.how_it_ended()}")

    def how_it_ended(self) -> str:
        """Text for messages: exit status or signal (or that it is running), and the last lines of the log."""
        code = self.process.poll()
        if code is None:
            how = "is running"
        else:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        if self.log is None:
            return how
        tail = self._tail(self.log)
        return f"{how}; its log {self.log} " + (f"ends:\n{tail}" if tail else "is empty")

    @staticmethod
    def _tail(log: Path, lines: int = 8) -> str:
        if not log.exists():
            return ""
        return "\n".join("    " + line for line in log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, grace_s: float = 3.0, first: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal `first` to its group, and SIGKILL after `grace_s` seconds. Raises DeadlineError if even
        SIGKILL does not end it."""
        signal_group(self.pid, first)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        signal_group(self.pid, signal.SIGKILL)
        try:
            self.process.wait(KILLED_S)
        except subprocess.TimeoutExpired:
            raise DeadlineError(
                f"{self.name} (process {self.pid}) has not ended {KILLED_S:g} s after SIGKILL: it hangs in the kernel "
                "(state D of ps), as with a disk or device that does not answer"
            ) from None


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a process group. Does nothing if the group has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def stop_all(children: Sequence[Child], grace_s: float = 3.0) -> None:
    """Stop several children within one grace period. Raises DeadlineError like `Child.stop`, once for all of them."""
    for child in children:
        signal_group(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    errors = []
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
        try:
            child.stop(0.0)
        except DeadlineError as error:  # continue with the other children
            errors.append(str(error))
    if errors:
        raise DeadlineError("; ".join(errors))


def python_command(module: str, *arguments: str) -> list[str]:
    """Command line that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def bind_cores(cores: Sequence[int]) -> None:
    """Bind this process and its later threads to CPU cores. Does nothing for an empty list, or if the system has no
    such call."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(cores))


def report_errors(work: Callable[[], None]) -> int:
    """Run the work of this process, and return its exit code: 0, BAD_INPUT, or 1 for another MetronomeError, whose
    message is on stderr."""
    try:
        work()
    except MetronomeError as error:
        log_error(f"error: {error}")
        return BAD_INPUT if isinstance(error, BadInput) else 1
    return 0


Result = TypeVar("Result")


def in_thread(name: str, act: Callable[[], Result]) -> Future[Result]:
    """Start `act` in a new thread. The future gets its result, or any exception that it raises. The process does not
    wait for the thread when it exits."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:  # noqa: BLE001 - the caller of result() gets it
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def run_to_end(child: Child, limit_s: float, late: str, grace_s: float = 3.0) -> None:
    """Wait for a process that does one piece of work. Raises the error that it tells: BadInput or another
    MetronomeError; DeadlineError, with the text `late`, after `limit_s`, and then `grace_s` to end."""
    try:
        code = child.process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise DeadlineError(late) from None
    finally:
        child.stop(grace_s)
    if not code:
        return
    assert child.log is not None
    told = last_message(child.log, "error: ").removeprefix("error: ")
    raise (BadInput if code == BAD_INPUT else MetronomeError)(told or f"the {child.name} {child.how_it_ended()}")
