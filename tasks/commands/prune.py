"""Deletes what nothing needs any more: parts of run folders, policies downloaded beside them, and whole old runs.

What MLflow and Prefect have of a run stays: figures, registered policies, flow runs. The pages of both and `mlflow gc`
delete that.
"""

from __future__ import annotations

import shutil
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.errors import BadInput
from engine.evaluation.tables import old_tables
from engine.run.checkpoint_files import DAMAGED, fault_of, latest_checkpoint
from engine.run.checkpoint_store import delete_published, place_of, published_size
from engine.run.files import read_lines
from engine.run.folder import RunFolder
from engine.run.lock import check_not_held, hold_lock
from engine.run.progress import folder_size, format_size
from engine.run.run_file import FILE, read_run
from engine.run.served_model import EXPORTED, FETCH, IN_USE, MODELS, REGISTERED, use_lock
from engine.run.trace import cut_spans
from engine.wire import record
from tasks.commands.compare import align_columns
from tasks.commands.export import is_exported
from tasks.terminal.console import print_error

PLACES = ("", "checkpoints", EXPORTED, "evaluations", "logs", "responses", "trace")
"""Folders of a run folder in which a killed process may leave something half written."""

YOUNG_S = 3600.0
"""What changed so few seconds ago may be in use."""


@dataclass(frozen=True)
class Removable:
    """Something that can go."""

    path: Path | str
    """A file or folder, or the address of one on S3."""
    why: str
    size: int
    """In bytes; 0 where that is not known."""
    remove: Callable[[], object]


@dataclass(frozen=True)
class Retention:
    """Which whole runs stay. 0: this part keeps none. A rule of zeros keeps all runs."""

    last: int = 0
    """The newest runs of each recipe."""
    days: float = 0.0
    """Runs that changed within so many days."""

    def __bool__(self) -> bool:
        return bool(self.last or self.days)


def prune(
    runs: Sequence[Path],
    keep_steps: int,
    records: bool,
    apply: bool,
    rule: Retention = Retention(),  # noqa: B008
) -> str:
    """Find what can go in run folders and among the policies downloaded beside them, and delete it if `apply`. Return a
    table of it. A run that a process writes or reads now is reported and left as it is.

    `runs`: run folders, or folders of them. `keep_steps`: number of newest steps whose spans, samples and tables stay.
    `records`: also the records of finished runs. `rule`: which whole runs stay; the others go, with their checkpoints
    at `checkpoint.path`. Raises BadInput, before anything is deleted, if a folder is no run folder, or if a config
    beside it is damaged.
    """
    folders = _run_folders(runs)
    outputs = dict.fromkeys(folder.path.parent for folder in folders)
    _models_of_runs(outputs)  # a damaged config is refused first
    free = [folder for folder in folders if _is_free(f"run folder {folder.path}", _locks(folder))]
    unread = [folder for folder in free if rule and _is_free(f"run folder {folder.path}", _read_locks(folder))]
    old = _find_old(unread, rule, outputs) if rule else {}
    found = []
    for folder in free:
        whole = folder.path in old
        models = _models_of_runs([folder.path.parent], old)
        try:
            with ExitStack() as held:
                for lock in (*_locks(folder), *(_read_locks(folder) if whole else ())):
                    if not apply:
                        check_not_held(lock, f"run folder {folder.path}")
                    elif lock.parent.is_dir():
                        held.enter_context(hold_lock(lock, f"run folder {folder.path}", 0.0))
                own = old[folder.path] if whole else list(_of_run(folder, keep_steps, records, models))
                for one in own if apply else ():
                    one.remove()
        except BadInput as error:
            print_error(f"warning: {error}. It is left as it is")
            old.pop(folder.path, None)
            continue
        found += own
    for output in outputs:
        downloads = list(_downloads(output, _models_of_runs([output], old)))
        for one in downloads if apply else ():
            one.remove()
        found += downloads
    return "\n".join([_table(found, apply), *_hub_cache()])


def _find_old(folders: Sequence[RunFolder], rule: Retention, outputs: Iterable[Path]) -> dict[Path, list[Removable]]:
    """What can go of each run that the rule does not keep, by run folder: its checkpoints at `checkpoint.path`, and the
    folder itself, last, so that an interrupted deletion can be repeated.

    A run also stays if it changed within the last hour, if it is a copy of a run, or if another run that stays starts
    from its policy (`outputs`: where all runs are that may).
    """
    old = _by_rule(folders, rule)
    models = _models_of_runs(outputs, [folder.path for folder in old])
    found: dict[Path, list[Removable]] = {}
    for folder in old:  # newest first: a run starts from an older one
        needed = any(_within(one, folder.path) for one in models)
        if why := "a run that stays starts from its policy" if needed else _is_copy(folder):
            print_error(f"{folder.path} stays: {why}")
            models.append(Path(folder.read_config().model.path))
        else:
            found[folder.path] = [*_published(folder), _folder(folder)]
    return found


def _by_rule(folders: Sequence[RunFolder], rule: Retention) -> list[RunFolder]:
    """The runs that the rule lets go, newest first."""
    now = time.time()
    seen: dict[str, int] = {}
    old = []
    for age, folder in sorted(((now - _changed(one), one) for one in folders), key=lambda each: each[0]):
        name = read_run(folder.path).start.registered
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > rule.last and age > max(YOUNG_S, rule.days * 86400):
            old.append(folder)
    return old


def _changed(folder: RunFolder) -> float:
    files = (folder.config, folder.steps, folder.evaluations, folder.path / FILE)
    return max(file.stat().st_mtime for file in files if file.exists())


def _within(model: Path, run: Path) -> bool:
    """Whether a model may be in a run folder. A relative one counts from a folder that is not known here, and a link
    may lead to it, so only names are compared."""
    return run.name in model.parts[:-1]


def _is_copy(folder: RunFolder) -> str:
    """Why a folder may not be the one that its run wrote. Its checkpoints at `checkpoint.path` are then not this
    folder's."""
    own = folder.read_config().folder
    if own.resolve() == folder.path:
        return ""
    return f"by its config.toml it belongs at {own}; if it is no copy, prune where `metronome run` was called"


def _folder(folder: RunFolder) -> Removable:
    def remove() -> None:
        for path in folder.path.iterdir():
            if path != folder.config:
                _delete(path)
        folder.config.unlink()  # last: with it the folder is still a run folder, and the command can be repeated
        folder.path.rmdir()

    return Removable(folder.path, "an old run", folder_size(folder.path), remove)


def _published(folder: RunFolder) -> Iterator[Removable]:
    place = place_of(folder.read_config())
    number = read_run(folder.path).id
    if place and number and (size := published_size(place, number)):
        yield Removable(place, "its checkpoints", size, partial(delete_published, place, number))


def _run_folders(given: Sequence[Path]) -> list[RunFolder]:
    """Each run once, also if a link beside it leads to it or if it is given twice."""
    found: dict[Path, RunFolder] = {}
    for place in (path.resolve() for path in given):
        folder = RunFolder(place)
        inside = [] if folder.config.is_file() else sorted(place.glob("*/config.toml"))
        if not inside and not folder.config.is_file():
            raise BadInput(f"{place}: neither a run folder (it has no config.toml) nor a folder of run folders")
        for path in sorted((config.parent for config in inside), key=Path.is_symlink) or [place]:
            found.setdefault(path.resolve(), RunFolder(path))
    return list(found.values())


def _locks(folder: RunFolder) -> tuple[Path, ...]:
    """What those hold who write the run."""
    return folder.lock, folder.path / EXPORTED / ".lock"


def _read_locks(folder: RunFolder) -> Iterator[Path]:
    """What those hold who read the run's policies."""
    yield from (path for place in ("", EXPORTED) for path in (folder.path / place).glob(f".*{IN_USE}"))


def _is_free(what: str, locks: Iterable[Path]) -> bool:
    """Whether nobody holds a lock; otherwise says who does."""
    try:
        for lock in locks:
            check_not_held(lock, what)
    except BadInput as error:
        print_error(f"warning: {error}. It is left as it is")
        return False
    return True


def _hub_cache() -> list[str]:
    """A line with the size of the models and data that came from the hub; none if there is no cache."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        found = scan_cache_dir()
    except (CacheNotFound, ValueError):
        return []
    note = "shared with other programs, so it stays: hf cache ls and hf cache rm"
    return [f"the hub's cache has {format_size(found.size_on_disk)} ({note})"] if found.repos else []


def _table(found: Sequence[Removable], applied: bool) -> str:
    if not found:
        return "nothing can go"
    total = format_size(sum(one.size for one in found))
    rows = [[format_size(one.size) if one.size else "", str(one.path), one.why] for one in found]
    end = f"{total} deleted" if applied else f"{total} in all; with --yes it is deleted"
    return f"{align_columns(rows)}\n{end}"


def _of_run(folder: RunFolder, keep_steps: int, records: bool, models: Sequence[Path]) -> Iterator[Removable]:
    newest = max((row["step"] for row in read_lines(folder.steps)), default=-1)
    before = newest + 1 - keep_steps
    for path in sorted(folder.trace.glob("*.jsonl")):
        if size := cut_spans(path, before, dry=True):
            yield Removable(path, f"spans of steps before {before}", size, partial(cut_spans, path, before))
    samples = [path for step, path in folder.all_samples() if step < before]
    yield from _together(folder.responses, samples, f"samples of steps before {before}")
    tables = old_tables(folder, before)
    yield from _together(folder.path / "evaluations", tables, f"tables of versions before {before}")
    for checkpoint in sorted(folder.checkpoints.glob("step-*")):
        copy = folder.path / EXPORTED / checkpoint.name
        needless = not _is_model(copy, models) and fault_of(checkpoint) is None and is_exported(checkpoint, copy)
        if needless and _is_free(f"model {copy}", [use_lock(copy)]):
            yield from _together(copy, [copy], "copy of a checkpoint; metronome export makes it again")
    for path in sorted(path for place in PLACES for path in (folder.path / place).glob("*.partial")):
        whole = path.parent == folder.checkpoints and fault_of(path) is None
        if _is_old(path) and not whole:
            yield from _together(path, [path], "left by a process that was killed")
    newest_whole = latest_checkpoint(folder.checkpoints)
    aside = [path for path in sorted(folder.checkpoints.glob(f"{DAMAGED}*")) if newest_whole and _is_old(path)]
    yield from _together(folder.checkpoints, aside, "damaged checkpoint; a whole one is there")
    profile = folder.path / "profile"
    if profile.is_dir() and _is_old(profile):
        yield from _together(profile, [profile], "profile (train.profile)")
    file = folder.path / record.FILE
    if records and file.is_file() and folder.policy.is_dir() and newest + 1 >= folder.read_config().train.steps:
        yield from _together(file, [file], "record of a finished run, which can't be replayed or prolonged then")


def _together(place: Path, paths: Sequence[Path], why: str) -> Iterator[Removable]:
    """Files and folders as one line of the table; none if there are none."""

    def remove() -> None:
        for path in paths:
            _delete(path)

    if paths:
        size = sum(folder_size(path) if _is_folder(path) else path.lstat().st_size for path in paths)
        yield Removable(place, f"{len(paths)} {why}" if len(paths) > 1 else why, size, remove)


def _downloads(output: Path, models: Sequence[Path]) -> Iterator[Removable]:
    """The policies that were fetched from the registry, and from which no run in `output` started. Other models there
    are the user's."""
    for path in sorted((output / MODELS).glob("*")):
        ours = path.name.startswith(FETCH) or (path / REGISTERED).is_file()
        if not ours or not _is_old(path) or _is_model(path, models):
            continue
        if _is_free(f"model {path}", [use_lock(path)]):
            yield from _together(path, [path], "download from the registry that is no run's model.path here")


def _models_of_runs(outputs: Iterable[Path], without: Collection[Path] = ()) -> list[Path]:
    """model.path of every run in folders of runs, but those `without` which it is asked."""
    found = []
    for config in (file for output in outputs for file in output.glob("*/config.toml") if file.parent not in without):
        try:
            found.append(Path(tomllib.loads(config.read_text())["model"]["path"]))
        except (ValueError, KeyError, TypeError):
            raise BadInput(f"{config}: the file is damaged, so what the run needs is unknown; repair it") from None
    return found


def _is_model(path: Path, models: Sequence[Path]) -> bool:
    """Whether one of the models may be this folder. Relative ones count from a folder that is not known here, so only
    the last three names are compared."""
    return any(path.parts[-3:][-len(model.parts) :] == model.parts[-3:] for model in models)


def _is_old(path: Path) -> bool:
    return time.time() - path.lstat().st_mtime > YOUNG_S


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _delete(path: Path) -> None:
    """Delete a file or a folder; of a link, not what it leads to."""
    shutil.rmtree(path) if _is_folder(path) else path.unlink()
