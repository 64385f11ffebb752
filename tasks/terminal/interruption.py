"""Handles Ctrl-C and SIGTERM: the first ends a command through its `finally` blocks, the second ends it immediately.

An interrupted run says what it saved and how to continue it.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

from engine.config import Config
from engine.errors import counted
from engine.run.checkpoint_files import DAMAGED, all_complete, latest_checkpoint, step_of
from engine.run.divergence import spoilt_checkpoints
from engine.run.files import read_lines
from engine.run.folder import RunFolder
from engine.run.run_status import resume_command
from tasks.terminal import console

INTERRUPTED = 130
"""Exit status of a command that a signal ended."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
AT_ONCE = (
    "stopped at once; its processes end within seconds: whatever was not on disk yet is lost, and MLflow shows the "
    "run as RUNNING until it is resumed"
)


class _Command:
    """State of the command that this process runs."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The first signal received."""
        self.stops = False
        """Whether the run is being stopped."""
        self.run: tuple[Config, str] | None = None
        """The run that the command trains, and the name of the command."""
        self.last_words = f"\n{AT_ONCE}\n".encode()
        """What the second signal prints. Prepared in advance, because a signal handler may do little."""


_command = _Command()


def catch_signals() -> None:
    """Let the first signal raise KeyboardInterrupt, and the second end this process. (Lifelines end its children.)"""
    global _command
    _command = _Command()
    for number in SIGNALS:
        signal.signal(number, _handle)


def _handle(number: int, frame: FrameType | None) -> None:
    if _command.signal is not None:
        os.set_blocking(2, False)  # a stopped terminal, or a pipe that nobody reads, must not delay the exit
        with suppress(OSError):
            os.write(2, (console.SHOW_CURSOR if console.is_terminal() else b"") + _command.last_words)
        os.set_blocking(2, True)  # the shell shares this terminal
        os._exit(INTERRUPTED)
    _command.signal = signal.Signals(number)
    raise KeyboardInterrupt


def note_run(config: Config, command: str) -> None:
    """Store which run `metronome <command>` trains, for `last_message` and `how_on`."""
    _command.run = (config, command)
    resume = resume_command(RunFolder(config.folder), command)
    _command.last_words = f"\n{AT_ONCE}\n  resume      {resume}\n".encode()


def signal_of(ended: BaseException) -> signal.Signals | None:
    """The signal behind an exception; None for any other exception. For SIGTERM, Prefect raises its own exception."""
    if isinstance(ended, KeyboardInterrupt):
        return _command.signal or signal.SIGINT
    number = getattr(ended, "signal", None) if not isinstance(ended, Exception) else None
    return signal.Signals(number) if isinstance(number, int) else None


def is_stopping() -> bool:
    """Whether a signal has begun to end this process. Another one would end it at once."""
    return _command.stops or _command.signal is not None


def say_stopping(seconds: float) -> None:
    """Say that a signal was received, what is saved, and what a second signal would lose."""
    _command.stops = True
    again = "Ctrl-C again" if _command.signal in (None, signal.SIGINT) else "another signal"
    saving = f"the trainer saves the weights from before this step, for up to {seconds:.0f} s"
    lost = ""
    if _command.run is not None:
        steps = _unsaved_steps(RunFolder(_command.run[0].folder))
        told = counted(steps, "finished step")
        saving = saving if steps else "no finished step is unsaved"
        lost = f" and loses {told}" if steps else ""
        _command.last_words = _command.last_words.replace(b"is lost", f"is lost (at most {told})".encode())
    _on_own_line(f"stopping: {saving}; {again} ends at once{lost}")


def _unsaved_steps(folder: RunFolder) -> int:
    """Number of finished steps that no checkpoint has."""
    done = max((row["step"] + 1 for row in read_lines(folder.steps)), default=0)
    checkpoint = latest_checkpoint(folder.checkpoints)
    return max(0, done - (step_of(checkpoint) if checkpoint is not None else 0))


def last_message() -> str:
    """The last message of a command that a signal ended."""
    head = f"interrupted by {(_command.signal or signal.SIGINT).name}"
    if _command.run is not None and not RunFolder(_command.run[0].folder).config.exists():
        return f"{head}; the run had not started, so nothing was saved"
    return head + how_on()


def how_on() -> str:
    """Lines that say what the run has saved and how to continue it; "" if no run has begun."""
    if _command.run is None:
        return ""
    config, command = _command.run
    folder = RunFolder(config.folder)
    if not folder.config.exists():
        return ""
    spoilt = spoilt_checkpoints(folder)
    whole = [one for one in all_complete(folder.checkpoints) if one not in spoilt]
    before = " before it diverged" if spoilt else ""
    if whole:
        saved = f"{whole[-1]}, after {step_of(whole[-1]):,} of {counted(config.train.steps, 'step')}{before}"
    elif any(folder.checkpoints.glob(f"{DAMAGED}*")):
        saved = "no whole checkpoint: without the damaged ones training starts again at its first step"
    else:
        saved = f"no checkpoint{before or ' yet'}: training starts again at its first step"
    return (
        f"\n  saved       {saved}\n  resume      {resume_command(folder, command)}\n  log         "
        f"{log if (log := folder.logs / 'orchestrator.log').exists() else folder.logs}"
    )


def say_told() -> None:
    """Print `last_message`."""
    _on_own_line(last_message())


def _on_own_line(message: str) -> None:
    """Print on stderr. A terminal shows ^C at the cursor, so there the message starts on a new line."""
    if sys.stderr.isatty():
        sys.stderr.write("\n")
    console.print_error(message)
