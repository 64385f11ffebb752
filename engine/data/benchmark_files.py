"""Benchmarks by name or file, and where their files are searched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.config import Config
from engine.config.recipe import find_file
from engine.data.hub import read_hub, set_name
from engine.data.problem_files import SUFFIXES
from engine.errors import BadInput
from engine.run.files import write_atomically


@dataclass(frozen=True)
class Format:
    """A known benchmark: its dataset on the hub and the names of its local files."""

    hub: str
    """Its id on the Hugging Face hub; empty if no version there is known."""
    split: str
    problems: int
    """Number of problems in the hub's version (amc24: in GAC, whose 53.3 % are 24 of 45). A different number is
    reported, not rejected (AMC has two versions)."""
    files: tuple[str, ...]
    """Names of its local files without suffix, or of folders with a test file."""


FORMATS: dict[str, Format] = {
    "aime24": Format("HuggingFaceH4/aime_2024", "train", 30, ("aime24", "aime_2024", "aime2024")),
    "aime25": Format("math-ai/aime25", "test", 30, ("aime25", "aime_2025", "aime2025")),
    "amc": Format("math-ai/amc23", "test", 40, ("amc", "amc23", "amc_2023")),
    "amc24": Format("", "", 45, ("amc24", "amc_2024", "amc2024")),
    "gsm8k": Format("openai/gsm8k", "test", 1319, ("gsm8k", "gsm8k_test")),
    "math500": Format("HuggingFaceH4/MATH-500", "test", 500, ("math500", "math_500", "MATH-500")),
    "minerva": Format("math-ai/minervamath", "test", 272, ("minerva", "minerva_math", "minervamath")),
    "olympiadbench": Format("math-ai/olympiadbench", "test", 674, ("olympiadbench", "olympiad_bench", "OlympiadBench")),
}
"""The benchmarks by the name in `evaluate.benchmark`. Hub ids and sizes are from the datasets' pages in October
2026."""


def benchmark_paths(config: Config) -> dict[str, str]:
    """Name → path for `read_problems`, for each entry of `evaluate.benchmark`, in order; {} if it is empty.

    The name of a file is its file name without suffix. Raises BadInput for a name that occurs twice or cannot be found;
    the message lists the places that were searched.
    """
    found: dict[str, str] = {}
    for given in config.evaluate.benchmarks:
        name = given.lower() if given.lower() in FORMATS else set_name(given)
        if name in found:
            raise BadInput(f"evaluate.benchmark names {name!r} twice; names of files without suffix must differ too")
        found[name] = _path(given, config)
    return found


def _path(given: str, config: Config) -> str:
    known = FORMATS.get(given.lower())
    if known is None:
        if not find_file(given).exists() and "/" not in given and not Path(given).suffix:
            raise BadInput(
                f"evaluate.benchmark: {given}: no such file or folder, and no benchmark of this name; the names are "
                + ", ".join(FORMATS)
            )
        return given
    cached = _cache(config) / f"{given.lower()}.jsonl"
    path = next(_candidates(known, config), None) or (
        cached if cached.is_file() else _fetched(given.lower(), known, config)
    )
    return str(path)


def _candidates(known: Format, config: Config) -> Iterator[Path]:
    """Possible local files of a benchmark: in evaluate.folder, else in the folders of the problem sets of `data`."""
    for folder in _folders(config):
        for stem in known.files:
            for suffix in SUFFIXES:
                for path in (folder / f"{stem}{suffix}", folder / stem / f"test{suffix}"):
                    if path.is_file():
                        yield path


def _folders(config: Config) -> list[Path]:
    if config.evaluate.folder:
        return [Path(config.evaluate.folder).expanduser()]
    sets = [*(one.path for one in config.data.sets), config.data.heldout]
    local = [path for path in sets if path and "://" not in path]
    return list(dict.fromkeys(find_file(path).parent for path in local))


def _cache(config: Config) -> Path:
    return Path(config.run.output) / "benchmarks"


def _fetched(name: str, known: Format, config: Config) -> Path:
    """The benchmark's file under run.output, downloaded from the hub the first time. Raises BadInput."""
    try:
        if not known.hub:
            raise BadInput("no version there is known; put a file with problem and answer into the folder")
        _, rows = read_hub(f"{known.hub}:{known.split}")
    except BadInput as error:
        places = " or ".join(str(folder) for folder in _folders(config))
        raise BadInput(
            f"benchmark {name!r}: {places} (evaluate.folder) has none of {', '.join(known.files)} as "
            f"{', '.join(SUFFIXES)}, and the hub gives none: {error}"
        ) from None
    path = _cache(config) / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(row) + "\n" for _, row in rows))
    return path
