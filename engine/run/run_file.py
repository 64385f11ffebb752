"""run.json, what is known of a run as a whole: its id, how it began, its attempts, its inputs, its finished stages.

One process writes it: the flow, `metronome train` or `metronome service` that holds the lock of the run folder, or an
orchestrator that was started by itself. All others read it.

Only the newest attempt at a run may write to its folder (`Fence`), even if a lock was lost: an NFS server that believes
a node is dead releases the node's locks, and another process begins. So each attempt takes the next number, and it and
its orchestrator write only while the newest number in run.json is theirs. Logs and traces are not checked: their lines
only mix with those of the newer attempt.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec

from engine.errors import BadInput, TakenOver
from engine.run.files import open_sealed, seal, write_json

FILE = "run.json"
ATTEMPTS = 100
"""Number of newest attempts that are kept."""
ContinueFrom = Literal["base", "nightly", "latest", "champion"]
Start = Literal["flow", "training"]
START = "the start of the flow"
"""Why a flow's first training starts."""


class InputPart(TypedDict):
    """One part of a run's inputs (engine.run.run_inputs)."""

    named: str
    """The functions of one's own by `name_code`, so without the folders of their files; "" for a model's files."""
    hash: str
    """SHA-256 (hex) of the files; "" if there are none."""
    path: str
    """The model's folder; "" for code."""


class RunStart(msgspec.Struct, frozen=True):
    """How a run began."""

    start: ContinueFrom = "base"
    """The parameter `continue_from` of the flow."""
    continued_from: str = ""
    """The registered policy from which the run started, as models:/NAME/VERSION; "" if `model.path` is not a registered
    one."""
    recipe: str = ""
    """The recipe, as the command named it; "" if unknown."""
    registered: str = ""
    """Name of the registered model to which the run's policy belongs; "" if unknown."""


class Attempt(msgspec.Struct, frozen=True):
    """A start of a flow, or of the training in it."""

    number: int
    """1 for the run's first attempt. Only the newest one may write the run (engine.run.run_file)."""
    at: float
    """Seconds since the epoch."""
    what: Start
    why: str
    """Why it was started: how the attempt before it ended."""
    progress: tuple[int, int] = (0, -1)
    """Number of finished stages, and step of the newest complete checkpoint (-1: none)."""
    by_hand: bool = False
    """Whether a person or a schedule started it."""


class RunFile(msgspec.Struct, frozen=True):
    """The content of run.json."""

    id: str = ""
    """The run's id, which its checkpoints have, too (engine.run.identity); "" before it begins."""
    began: float = 0.0
    """When it began, in seconds since the epoch."""
    start: RunStart = RunStart()
    flow_run: str = ""
    """The id of Prefect's flow run that entered the folder last; "" for `metronome train`."""
    attempts: tuple[Attempt, ...] = ()
    """The newest attempts, the newest last."""
    inputs: dict[str, InputPart] = {}
    stages: dict[str, Any] = {}
    """The results of the finished stages, by name."""

    @property
    def attempt(self) -> int:
        """Number of the newest attempt; 0 before the first."""
        return self.attempts[-1].number if self.attempts else 0

    @property
    def resumes(self) -> list[Attempt]:
        """The starts of the run or of its training after the first, by a person or after a crash, as far as they are
        kept."""
        flows = [one for one in self.attempts if one.what == "flow"]
        again = (one for one in self.attempts if one.what == "training" and one.why != START)
        return sorted([*flows[1:], *again], key=lambda one: one.number)

    @property
    def began_at(self) -> datetime | None:
        """When the run began, in UTC; None before it begins."""
        return datetime.fromtimestamp(self.began, UTC) if self.began else None


def read_run(folder: Path) -> RunFile:
    """What run.json in a run folder says; an empty one if no run has begun there. Raises BadInput if it is damaged."""
    file = folder / FILE
    if not file.exists():
        return RunFile()
    text = file.read_bytes()
    try:
        return msgspec.convert(open_sealed(text), RunFile)
    except msgspec.ValidationError:
        raise BadInput(
            f"{file}: what is known of the run can't be read, because the file is damaged ({len(text)} bytes); make "
            "sure that no process of the run is running, delete the file, and resume with the recipe's name: the run's "
            "id comes from its newest checkpoint, and its stages are repeated"
        ) from None


def update_run(folder: Path, **changes: Any) -> RunFile:  # noqa: ANN401
    """Replace fields of run.json. Only the process that holds the folder's lock may call this."""
    changed = msgspec.structs.replace(read_run(folder), **changes)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, seal(msgspec.to_builtins(changed)))
    return changed


class Fence:
    """The right of an attempt to write to a run folder."""

    def __init__(self, folder: Path, attempt: int = 0, lock: int | None = None) -> None:
        """`attempt`: its number; 0: a process that took no number and is never fenced off. `lock`: the open file that
        holds the folder's lock, for the orchestrator."""
        self.folder = folder
        self.attempt = attempt
        self.lock = lock

    def begin_attempt(
        self,
        what: Start,
        why: str,
        progress: tuple[int, int] = (0, -1),
        by_hand: bool = False,
    ) -> None:
        """Take the next number. The caller must hold the lock. Raises TakenOver if a newer attempt has begun."""
        self.check_attempt()
        before = read_run(self.folder)
        taken = Attempt(
            number=before.attempt + 1, at=time.time(), what=what, why=why, progress=progress, by_hand=by_hand
        )
        update_run(self.folder, attempts=(*before.attempts, taken)[-ATTEMPTS:])
        self.attempt = taken.number

    @property
    def is_passed(self) -> bool:
        """Whether a newer attempt has begun."""
        return bool(self.attempt) and read_run(self.folder).attempt != self.attempt

    def check_attempt(self) -> None:
        """Raise TakenOver if a newer attempt has begun."""
        if self.is_passed:
            raise TakenOver(
                f"run folder {self.folder}: another attempt ({read_run(self.folder).attempt}) writes it now; this one "
                f"(attempt {self.attempt}) stops without writing any more"
            )
