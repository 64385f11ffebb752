"""The record of a run: the windows and early work of each trainer unit, in the order in which they were leased."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import msgspec

from engine.config import Config
from engine.config.keys import current_names, flatten
from engine.errors import BadInput
from engine.model.shape import content_hash
from engine.run.files import put_in_place
from engine.types import BatchScores, Group, JsonObject, Prompt, Score
from engine.wire.codec import PackedLanded, PackedResponse, open_ids, open_response
from engine.wire.messages import EarlyWork, Window
from engine.wire.sealed import SealedGroup, is_whole, open_group

PLAN = (
    "model.dtype", "rollout.group_size", "rollout.max_new_tokens", "rollout.temperature", "train.prompts_per_step",
    "train.updates", "train.micro_batch_tokens", "train.learning_rate", "train.schedule", "train.warmup_steps",
    "train.weight_decay", "train.betas", "train.max_grad_norm", "train.dtype", "train.recompute",
    "train.distributed_optimizer", "algorithm", "attention", "parallel",
)  # fmt: skip
"""Keys whose values, with the content of the base model, must be those of the recorded run, so that a replay gives the
same weights. A name without a dot stands for a whole table."""


FILE = "record.msgpack"
"""Name of a run's record in its folder."""


class OlderGroup(msgspec.Struct, frozen=True):
    """A group in a record of an older release. The trainer computes the advantages of batch scope now, unless the
    record has them."""

    step: int
    index: int
    prompt: tuple[str, str, str, bytes]
    """Id, problem, answer, token ids (int32)."""
    responses: tuple[PackedResponse, ...]
    scores: tuple[Score, ...]
    advantages: tuple[float, ...] | None = None
    batch: BatchScores | None = None
    mini_batch: int = 0

    def opened(self) -> Group:
        """The group."""
        identity, problem, answer, token_ids = self.prompt
        return Group(
            step=self.step,
            index=self.index,
            prompt=Prompt(identity, problem, answer, open_ids(token_ids)),
            responses=tuple(map(open_response, self.responses)),
            scores=self.scores,
            batch=self.batch,
            mini_batch=self.mini_batch,
            advantages=self.advantages,
        )


class RecordEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One reply to a unit: a window to train, or responses to score early."""

    unit: int
    step: int
    sealed: tuple[SealedGroup, ...] = ()
    batch: BatchScores | None = None
    """As of `Window`."""
    landed: tuple[PackedLanded, ...] = ()
    groups: tuple[OlderGroup, ...] = ()

    @property
    def size(self) -> int:
        """Number of groups."""
        return len(self.sealed) + len(self.groups)

    def window(self) -> list[Group]:
        """The groups, to be trained together. Raises TransferError for a damaged one."""
        return [open_group(group, self.batch) for group in self.sealed] + [group.opened() for group in self.groups]


class RecordWriter:
    """Writes `record.msgpack`: first the settings, then each window and early work that a unit leases.

    Micro-batches are not recorded, because they are a function of the windows.
    """

    def __init__(self, path: Path, config: Config, start: int) -> None:
        """Open the record. On resume the entries of steps from `start` on are removed, because these steps are redone.

        Raises BadInput if the settings differ from those of the record that is continued: a replay has one plan for
        all steps.
        """
        kept = check_continued(path, config, start)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            file.write(msgspec.msgpack.encode({"plan": plan(config)}))
            file.writelines(map(msgspec.msgpack.encode, kept))
        put_in_place(partial, path)
        self._file = path.open("ab")

    def add(self, step: int, unit: int, given: Window | EarlyWork) -> None:
        """Append a window or early work of a unit."""
        if isinstance(given, Window):
            entry = RecordEntry(unit=unit, step=step, sealed=given.groups, batch=given.batch)
        else:
            entry = RecordEntry(unit=unit, step=step, landed=given.landed)
        self._file.write(msgspec.msgpack.encode(entry))

    def flush(self) -> None:
        """Put the added entries on the disk; called once a step."""
        self._file.flush()
        os.fsync(self._file.fileno())


def check_continued(path: Path, config: Config, start: int) -> list[RecordEntry]:
    """The entries of a record that stay when its run goes on with step `start`; none without a record.

    Raises BadInput if the settings are not those of the record, or if it is damaged before the groups of that step.
    """
    kept = _entries_before(path, config, start) if path.exists() else []
    if kept:
        _check_same_plan(path, config, "--resume", "keep it, or go on with train.record = false")
    return kept


def _entries_before(path: Path, config: Config, start: int) -> list[RecordEntry]:
    """The entries of the steps before `start`. What is damaged behind them, as by a power cut, is done again."""
    kept: list[RecordEntry] = []
    try:
        kept.extend(entry for entry in read(path) if entry.step < start)
    except BadInput as damage:
        newest = sum(entry.size for entry in kept if entry.step == start - 1)
        if start and newest != config.train.prompts_per_step:
            raise BadInput(
                f"--resume: {path} is damaged and has only {newest} of {config.train.prompts_per_step} groups of step "
                f"{start - 1}; keep it, and go on with train.record = false"
            ) from damage
    return kept


def plan(config: Config) -> JsonObject:
    """Return the settings of `PLAN` by key, as JSON values, and the hash of the base model, whose files are read.

    They include train.steps if the learning rate falls towards the last step.
    """
    flat = flatten(config.model_dump(mode="json"))
    found: JsonObject = {"content of model.path": content_hash(Path(config.model.path))}
    falls = config.train.schedule != "constant"
    for key in (*PLAN, "train.steps") if falls else PLAN:
        found |= {name: value for name, value in flat.items() if f"{name}.".startswith(f"{key}.")}
    return found


def _unpack_items(path: Path) -> Iterator[Any]:
    try:
        with path.open("rb") as file:
            yield from msgpack.Unpacker(file)
    except FileNotFoundError:
        raise BadInput(f"--replay {path}: no such file; a run with train.record = true writes record.msgpack") from None
    except (msgpack.UnpackException, ValueError) as error:
        raise BadInput(f"--replay {path}: not a record of train.record ({error})") from None


def read(path: Path) -> Iterator[RecordEntry]:
    """Iterate over the entries of a record. Raises BadInput for a file that is no record, or is damaged."""
    items = _unpack_items(path)
    header = next(items, None)
    if not isinstance(header, dict) or not isinstance(header.get("plan"), dict):
        raise BadInput(f"--replay {path}: not a record of train.record (it does not begin with a run's settings)")
    for number, item in enumerate(items):
        try:
            entry = msgspec.convert(item, RecordEntry)
            if damaged := [group.index for group in entry.sealed if not is_whole(group)]:
                raise ValueError(f"the bytes of step {entry.step}, groups {damaged}, are not those that were recorded")
            yield entry
        except ValueError as error:
            raise BadInput(
                f"--replay {path}: entry {number} is damaged ({error}); replay with a whole copy of record.msgpack"
            ) from None


def check(path: Path, config: Config) -> None:
    """Raise BadInput unless the file is a record of a run with the settings that a replay needs."""
    for _ in read(path):
        pass  # read it to the end, so that a damaged entry is refused now
    _check_same_plan(path, config, f"--replay {path}", "replay with the recorded run's own config.toml")


def _check_same_plan(path: Path, config: Config, what: str, remedy: str) -> None:
    recorded = flatten(Config().model_dump(mode="json"))  # the value of keys that the record's release did not have
    recorded |= current_names(next(_unpack_items(path))["plan"])
    for key, value in plan(config).items():
        if recorded.get(key) != value:
            raise BadInput(f"{what}: {key} is {value!r}, but the record was taken with {recorded.get(key)!r}; {remedy}")
