"""The record of a run: the windows of each trainer replica group, in the order of their leases."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack
import msgspec

from engine.config import Config
from engine.errors import BadInput
from engine.run.files import put_in_place
from engine.run.resume import compared_value, keys_of
from engine.run.run_file import read_run
from engine.run.run_inputs import find_inputs
from engine.types import BatchScores, Group, JsonObject
from engine.wire.columns import Column, Row, open_group, pack_column
from engine.wire.messages import Window

FILE = "record.msgpack"
"""Name of the record in the run folder."""


class RecordEntry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A window that a replica group was given to train."""

    replica_group: int
    step: int
    rows: tuple[Row, ...]
    batch: BatchScores | None = None
    """As in `Window`."""

    @property
    def size(self) -> int:
        """Number of groups."""
        return len(self.rows)

    def window(self, reward_weights: Mapping[str, float] | None = None) -> list[Group]:
        """Return the groups to train together; `reward_weights` as in `open_group`. Raises TransferError for a damaged
        group."""
        return [open_group(row, self.batch, reward_weights=reward_weights) for row in self.rows]


class RecordWriter:
    """Writes `record.msgpack`: first the settings, then each window that a replica group leases.

    Micro-batches are not recorded, because the windows determine them.
    """

    def __init__(self, path: Path, config: Config, start: int) -> None:
        """Open the record. On resume, entries of steps from `start` on are removed, because these steps are repeated.

        Raises BadInput if the settings differ from those of the record that is continued: a replay has one plan for all
        steps.
        """
        kept = check_continued(path, config, start)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            file.write(msgspec.msgpack.encode({"plan": record_settings(config, path.parent)}))
            file.writelines(map(_sealed, kept))
        put_in_place(partial, path)
        self._file = path.open("ab")

    def add_window(self, replica_group: int, given: Window) -> None:
        """Append a window of a replica group."""
        entry = RecordEntry(replica_group=replica_group, step=given.step, rows=given.rows, batch=given.batch)
        self._file.write(_sealed(entry))

    def flush(self) -> None:
        """Write the added entries to disk; called once per step."""
        self._file.flush()
        os.fsync(self._file.fileno())


def check_continued(path: Path, config: Config, start: int) -> list[RecordEntry]:
    """Return the entries of a record that remain valid if its run continues with step `start`; [] without a record.

    Raises BadInput if the settings differ from the record's, or if the record is damaged before the groups of that
    step.
    """
    kept = _entries_before(path, config, start) if path.exists() else []
    if kept:
        _check_same_plan(path, config, "--resume", "keep it, or continue with train.record = false")
    return kept


def _entries_before(path: Path, config: Config, start: int) -> list[RecordEntry]:
    """Return the entries of the steps before `start`. Damaged entries after them, as from a power cut, are recorded
    again."""
    kept: list[RecordEntry] = []
    try:
        kept.extend(entry for entry in read_record(path) if entry.step < start)
    except BadInput as damage:
        newest = sum(entry.size for entry in kept if entry.step == start - 1)
        if start and newest != config.train.prompts_per_step:
            raise BadInput(
                f"--resume: {path} is damaged and has only {newest} of {config.train.prompts_per_step} groups of step "
                f"{start - 1}; keep it, and continue with train.record = false"
            ) from damage
    return kept


def record_settings(config: Config, run: Path | None = None) -> JsonObject:
    """Return what must be the same for a replay to give the same weights: the settings that are marked fixed or plan
    (engine.config.marks), and the hashes of the base model and of one's own code of the algorithm, whose files may lie
    elsewhere at a replay: those of the start of the run in the folder `run`, or of the present files.

    They include train.steps if the learning rate decays towards the last step, but not train.mode: a replay trains the
    same windows in any mode.
    """
    tables = config.model_dump(mode="json")
    began = {} if run is None else read_run(run).inputs
    inputs = began or find_inputs(config, Path(config.model.path), ["weights", "algorithms"])
    found: JsonObject = {"content of model.path": inputs["weights"]["hash"]}
    found |= {key: compared_value(tables, key) for key in keys_of("fixed", "plan") if key != "train.mode"}
    if config.train.schedule != "constant":
        found["train.steps"] = config.train.steps
    code = inputs["algorithms"]
    return found | ({"content of the algorithm's code": code["hash"]} if code["named"] else {})


def _sealed(entry: RecordEntry) -> bytes:
    """An entry with a digest of all its bytes, as a column has it."""
    return msgspec.msgpack.encode(pack_column("entry", entry))


def _unpack_items(path: Path) -> Iterator[Any]:
    try:
        with path.open("rb") as file:
            yield from msgpack.Unpacker(file)
    except FileNotFoundError:
        raise BadInput(f"--replay {path}: no such file; a run with train.record = true writes record.msgpack") from None
    except (msgpack.UnpackException, ValueError) as error:
        raise BadInput(f"--replay {path}: not a record of train.record ({error})") from None


def read_record(path: Path) -> Iterator[RecordEntry]:
    """Yield the entries of a record. Raises BadInput if the file is not a record or is damaged."""
    items = _unpack_items(path)
    header = next(items, None)
    if not isinstance(header, dict) or not isinstance(header.get("plan"), dict):
        raise BadInput(f"--replay {path}: not a record of train.record (it does not begin with a run's settings)")
    for number, item in enumerate(items):
        try:
            sealed = msgspec.convert(item, Column)
            if not sealed.is_whole:
                raise ValueError(f"its {len(sealed.body):,} bytes differ from those that were recorded")
            yield msgspec.msgpack.decode(sealed.body, type=RecordEntry)
        except msgspec.ValidationError as error:
            raise BadInput(f"--replay {path}: entry {number} is damaged, or of another release: {error}") from None
        except ValueError as error:
            raise BadInput(
                f"--replay {path}: entry {number} is damaged ({error}); replay with an intact copy of record.msgpack"
            ) from None


def check_record(path: Path, config: Config) -> None:
    """Raise BadInput unless the file is the record of a run with the settings that a replay needs."""
    for _ in read_record(path):
        pass  # read to the end, so that a damaged entry is reported now
    _check_same_plan(path, config, f"--replay {path}", "replay with the recorded run's own config.toml")


def _check_same_plan(path: Path, config: Config, what: str, remedy: str) -> None:
    recorded = next(_unpack_items(path))["plan"]
    for key, value in record_settings(config).items():
        if json.dumps(recorded.get(key)) != json.dumps(value):  # distinguishes true from 1, as train.recompute needs
            raise BadInput(f"{what}: {key} is {value!r}, but the record was taken with {recorded.get(key)!r}; {remedy}")
