"""From the config to the training problems and the held-out problems of a run: read, clean, split, decontaminate.

`prepare_problems` is a pure function of the config and the files. A run prepares its problems once and keeps them in
its folder (`write_prepared`); its later stages read them there.

Split: problems are held out by their content, so adding, removing or reordering rows moves no other row.

Decontaminate: training problems that are also in an evaluation set, copied or edited, are left out. The rule is that of
the Qwen2.5 report (arXiv 2412.15115, section 3): a common run of 13 words, and a longest common subsequence of at least
0.6 of the shorter problem. The run alone would also find phrases such as "where m and n are relatively prime positive
integers". Metronome adds a rule: all numbers of one problem must occur in the other. Otherwise two problems made from
one template would count as one. Problems of fewer than 13 words overlap if their words are equal.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

from engine.config import Config
from engine.config.inputs import Reward
from engine.data.benchmark_files import benchmark_paths
from engine.data.problems import (
    ProblemRow,
    Problems,
    Rejected,
    content_hash,
    count_reasons,
    read_problems,
)
from engine.data.prompts import prompt_id
from engine.data.row_format import RowFormat, has_column
from engine.errors import BadInput
from engine.reward.math.answers import tidy_answer, why_ungradable
from engine.reward.math.equality import same_answer
from engine.run.files import read_json, seal, write_atomically
from engine.types import JsonObject


def clean_problems(problems: Problems, reward: Reward) -> Problems:
    """The set with each problem once (`each_once`). For the reward "math", answers are also unwrapped (`tidy_answer`)
    and must be checkable. Raises BadInput if no row is left."""
    if reward.uses_math:
        rejected = list(problems.rejected)
        problems = with_rows(problems, _gradable(problems.rows, rejected), rejected)
    return each_once(problems, reward)


def each_once(problems: Problems, reward: Reward) -> Problems:
    """The set with each problem (`ProblemRow.identity`) once, with all answers as they are.

    Each problem must have a single answer, for the reward "math" in any spelling (`equality.same_answer`). A user's own
    reward may read more than the answer, so for it only equal rows are one. Raises BadInput if no row is left.
    """
    rejected = list(problems.rejected)
    return with_rows(problems, _once(problems.rows, rejected, reward), rejected)


def with_rows(problems: Problems, rows: Iterable[ProblemRow], rejected: Iterable[Rejected]) -> Problems:
    """The set with these rows, and `rejected` added to its rejected rows. Raises BadInput if no row is left."""
    kept = tuple(rows)
    out = tuple(rejected)
    if not kept:
        raise BadInput(f"problem set {problems.source}: no row is left out of {len(out)}; the first: {out[0]}")
    return replace(problems, rows=kept, rejected=out, skipped=count_reasons(out))


def text_key(problem: str) -> str:
    """The text of a problem or an answer with normalised blanks, which is the same for two spellings of one."""
    return " ".join(problem.split())


def _gradable(rows: Iterable[ProblemRow], rejected: list[Rejected]) -> Iterable[ProblemRow]:
    for row in rows:
        reason = why_ungradable(answer := tidy_answer(row.answer))
        if reason:
            expected = "a number, a formula or a few words, in LaTeX or plain"
            rejected.append(row.reject("answer", reason, row.answer, expected))
        else:
            yield row if answer == row.answer else replace(row, answer=answer)


def _once(rows: Sequence[ProblemRow], rejected: list[Rejected], reward: Reward) -> Iterable[ProblemRow]:
    answers: dict[str, dict[str, str]] = {}
    for row in rows:
        answers.setdefault(text_key(row.identity), {}).setdefault(text_key(row.answer), row.answer)
    contradicted = {key: found for key, each in answers.items() if (found := _different(each.values(), reward))}
    first: dict[tuple[str, str], ProblemRow] = {}
    for row in rows:
        key = text_key(row.identity)
        earlier = first.setdefault((key, text_key(row.answer) if reward.is_own else ""), row)
        if key in contradicted:
            rejected.append(row.reject("answer", "contradicted", contradicted[key], "one answer for one problem"))
        elif earlier is not row:
            rejected.append(row.reject("problem", "duplicate", row.problem, f"each row once; it is {earlier.where}"))
        else:
            yield row


def _different(answers: Iterable[str], reward: Reward) -> str:
    """Two of the answers that differ, as "1 and 2"; empty if all are one answer, or only a user's reward reads them."""
    pairs = () if reward.is_own else combinations(answers, 2)
    return next((" and ".join(pair) for pair in pairs if not (reward.uses_math and _same(*pair))), "")


def _same(one: str, other: str) -> bool:
    try:
        return same_answer(one, other)
    except (RecursionError, MemoryError):  # no genuine answer needs this much
        return False


FILE = "problems.json"
"""Name of the file in the run folder with the problems that the run trains on and those that it holds out."""


def split_problems(problems: Problems, fraction: float) -> tuple[Problems, Problems]:
    """Training rows and held-out rows, both in order. A row is held out with probability `fraction` (0 < fraction < 1).

    The hash of the problem's text without blanks decides, so all rows of one problem are on the same side. Raises
    BadInput if a side is empty.
    """
    sides: dict[bool, list[ProblemRow]] = {True: [], False: []}
    for row in problems.rows:
        sides[split_position(row.problem) < fraction].append(row)
    if not sides[True] or not sides[False]:
        raise BadInput(
            f"problem set {problems.source}: data.heldout_fraction = {fraction:g} puts all {len(problems.rows)} "
            "rows on one side; give another fraction, more rows, or a held-out file in data.heldout"
        )
    heldout = Problems(tuple(sides[True]), {}, f"{problems.source} (held out {fraction:g})", problems.content_hash)
    return replace(problems, rows=tuple(sides[False])), heldout


def split_position(problem: str) -> float:
    """A number in [0, 1) for a problem: 53 bits of SHA-256 of its text."""
    digest = hashlib.sha256(text_key(problem).encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


RUN = 13
"""Number of consecutive common words that make an overlap."""
PHRASE = 20
"""A run of words in more than this many distinct evaluation problems is a phrase of their template and is ignored."""
SHARE = 0.6
"""Minimum length of the longest common subsequence in an overlap, as a share of the shorter problem's words."""
_WORD = re.compile(r"[a-z]+|\d+(?:\.\d+)?|[+\-*/=<>^]|[^\W\d_]")
_DRAWING = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)
_SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\{,\}|,(?:\\!)?|\\[, ])\d{3})+(?!\d)")
_LAYOUT = frozenset(
    ("left", "right", "text", "mathrm", "textbf", "displaystyle", "quad", "qquad", "mbox", "big", "bigl", "bigr")
)
_SAME = {"dfrac": "frac", "tfrac": "frac", "leq": "le", "geq": "ge", "dots": "ldots", "cdots": "ldots"}


@dataclass(frozen=True)
class Overlap:
    """A training row and the row of an evaluation set that it overlaps with."""

    row: ProblemRow
    other: ProblemRow
    share: float
    """Longest common subsequence as a share of the shorter problem, in words."""


class Index:
    """An index of the problems of evaluation sets, used to compare them with training rows."""

    def __init__(self, rows: Iterable[ProblemRow]) -> None:
        self._whole: dict[tuple[str, ...], int] = {}
        self._rows: list[tuple[ProblemRow, tuple[str, ...]]] = []
        self._runs: dict[tuple[str, ...], list[int]] = {}
        for row in rows:  # each problem once, so that 32 copies in a file do not make its words a phrase
            text = tuple(problem_words(row.problem))
            if text and text not in self._whole:
                self._whole[text] = len(self._rows)
                self._rows.append((row, text))
        for number, (_, text) in enumerate(self._rows):
            for run in word_runs(text):
                self._runs.setdefault(run, []).append(number)

    def find(self, row: ProblemRow) -> Overlap | None:
        """The evaluation problem with the largest overlap (the first if several are equal); None if there is none."""
        text = tuple(problem_words(row.problem))
        found_runs = (self._runs.get(run, ()) for run in word_runs(text))
        candidates = {number for numbers in found_runs if len(numbers) <= PHRASE for number in numbers}
        candidates.update({self._whole[text]} if text in self._whole else ())
        found = [(common_share(text, self._rows[number][1]), -number) for number in candidates]
        best, number = max(found, default=(0.0, 0))
        return Overlap(row, self._rows[-number][0], best) if best >= SHARE else None


def problem_words(problem: str) -> list[str]:
    """Lower-case words, numbers (10,000 as 10000) and operators. LaTeX commands are words; layout and Asymptote are
    left out."""
    text = _THOUSANDS.sub(lambda found: re.sub(r"\D", "", found[0]), _DRAWING.sub(" ", problem).lower())
    text = _SHORT_FRACTION.sub(r" frac \1 \2", text)
    found = _WORD.findall(text)
    return [_SAME.get(word, word) for word in found if word not in _LAYOUT]


def word_runs(text: Sequence[str]) -> set[tuple[str, ...]]:
    """All runs of 13 words; for a shorter text, the whole text."""
    return {tuple(text[start : start + RUN]) for start in range(max(1, len(text) - RUN + 1))} if text else set()


def common_share(one: Sequence[str], other: Sequence[str]) -> float:
    """Length of the longest common subsequence over the shorter length; 0 if each has a number that the other lacks."""
    first = _numbers(one)
    second = _numbers(other)
    if not (first <= second or second <= first):
        return 0.0
    return common_length(one, other) / max(1, min(len(one), len(other)))


def common_length(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest common subsequence, by bit operations (Hyyrö 2004): one addition of long integers per
    word."""
    places: dict[str, int] = {}
    for index, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << index
    everywhere = row = (1 << len(one)) - 1
    for word in other:
        matched = row & places.get(word, 0)
        row = (row + matched | row - matched) & everywhere
    return len(one) - row.bit_count()


def _numbers(text: Sequence[str]) -> Counter[str]:
    return Counter(word for word in text if word[0].isdigit())


BENCHMARK = "benchmark"
"""Entry of `data.decontaminate` that stands for the held-out rows and `evaluate.benchmark`."""

IN_BENCHMARK = "in an evaluation set"
"""Why a training row was left out: it overlaps with an evaluation set."""


@dataclass(frozen=True)
class Prepared:
    """The problem sets of a run."""

    train: Problems
    """The cleaned training rows, without rows that are held out or evaluated."""
    heldout: Problems
    """The rows held out of training: those of data.heldout, unchanged, or a share of the training file."""
    against: tuple[str, ...]
    """The evaluation sets that `train` was compared with, by their source."""
    overlaps: tuple[Overlap, ...]
    """The training rows that were left out because they overlap, each with the row that it overlaps with."""
    origin: str
    """`origin_of` the config before the files were read."""
    notes: tuple[str, ...] = ()
    """Remarks for the user: a set with which `train` was not compared, and why."""


def prepare_problems(config: Config) -> Prepared:
    """All problem sets of a run. Raises BadInput like `read_problems`, and if no training row is left."""
    origin = origin_of(config)  # first: a file that changes from now on is then seen to differ
    train, heldout = _sides(config)
    sets, notes = _evaluation_sets(config, train, heldout)
    index = Index(row for problems in sets for row in problems.rows)
    overlaps = tuple(found for row in train.rows if (found := index.find(row)))
    left = _without(train, overlaps)
    parts = {row.part for row in left.rows}
    for number, one in enumerate(config.data.sets):
        if one.weight is not None and number not in parts:
            raise BadInput(f"data.train: no row of {one.path} is left to train on; the first: {left.rejected[0]}")
    return Prepared(
        train=left,
        heldout=heldout,
        against=tuple(problems.source for problems in sets),
        overlaps=overlaps,
        origin=origin,
        notes=(*train.notes, *notes),
    )


def training_problems(config: Config) -> Problems:
    """The problems that a run trains on. Raises BadInput like `prepare_problems` and `read_prepared`."""
    found = read_prepared(config)
    return prepare_problems(config).train if found is None else found[0]


def heldout_problems(config: Config) -> Problems:
    """The problems that a run is evaluated on if `evaluate.benchmark` is empty. Raises BadInput as above."""
    if config.data.heldout:
        return read_problems(config.data.heldout, RowFormat.of(config))
    found = read_prepared(config)
    return _sides(config)[1] if found is None else found[1]


def write_prepared(config: Config, prepared: Prepared) -> None:
    """Write the training and the held-out problems to the run folder, for `read_prepared`. Those of the same files and
    settings that are there stay, so a resumed run keeps its rows in a newer Metronome."""
    if read_prepared(config) is not None:
        return
    content = {"of": prepared.origin, "train": asdict(prepared.train), "heldout": asdict(prepared.heldout)}
    write_atomically(config.folder / FILE, json.dumps(seal(content)))


def read_prepared(config: Config) -> tuple[Problems, Problems] | None:
    """The training and the held-out problems that `write_prepared` wrote to the run folder. None if there are none, or
    if they are of other files or settings than the config's.

    Raises BadInput if the file is damaged, and if a problem set can't be read.
    """
    file = config.folder / FILE
    if not file.exists():
        return None
    found = read_json(file, "the run's problems", "delete it; the problem sets are then read again", sealed=True)
    return (_problems(found["train"]), _problems(found["heldout"])) if found["of"] == origin_of(config) else None


def problem_settings(config: Config) -> JsonObject:
    """The tables of a config that `prepare_problems` reads, and nothing else."""
    reward = config.reward
    return {
        "data": config.data.model_dump(mode="json"),
        "reward": {"function": "math" if reward.uses_math else "own:reward" if reward.is_own else "exact"},
        "evaluate": config.evaluate.model_dump(mode="json", include={"benchmark", "folder"}),
    }


def origin_of(config: Config) -> str:
    """SHA-256 (hex) of all that decides what `prepare_problems` returns: settings, and contents of the files."""
    text = json.dumps([problem_settings(config), file_hashes(config)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _problems(found: Mapping[str, Any]) -> Problems:
    """The set that `asdict` made plain."""
    rows = tuple(ProblemRow(**{**row, "messages": tuple(row["messages"])}) for row in found["rows"])
    rejected = tuple(Rejected(**row) for row in found["rejected"])
    return Problems(**{**found, "rows": rows, "rejected": rejected, "notes": tuple(found["notes"])})


def problems_version(problems: Problems) -> str:
    """SHA-256 (hex) over problem and answer of each row, in order. The same rows in another file have the same
    version."""
    ids = (prompt_id(row.identity, row.answer) for row in problems.rows)
    return hashlib.sha256("\n".join(ids).encode()).hexdigest()


def file_hashes(config: Config) -> dict[str, str]:
    """Content hash of every problem set that `prepare_problems` reads. A cached result depends on these hashes and the
    config."""
    return {path: content_hash(path) for path in _paths(config)}


def training_hash(config: Config) -> str:
    """The content hash of all sets of data.train, as a report has it (`Problems.content_hash`)."""
    return _joint_hash([content_hash(one.path) for one in config.data.sets])


def _joint_hash(hashes: Sequence[str]) -> str:
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def _sides(config: Config) -> tuple[Problems, Problems]:
    """Training and held-out problems, before decontamination."""
    train = clean_problems(_training_rows(config), config.reward)
    if config.data.heldout:
        return train, read_problems(config.data.heldout, RowFormat.of(config))
    return split_problems(train, config.data.heldout_fraction)


def _training_rows(config: Config) -> Problems:
    """The rows of the sets of `data.train`, one set after another."""
    layout = RowFormat.of(config)
    sets = [read_problems(one.path, layout) for one in config.data.sets]
    rows = tuple(replace(row, part=part) for part, one in enumerate(sets) for row in one.rows)
    for key, name in (("problem", layout.problem), ("answer", layout.answer)):
        if name and not any(has_column(row.columns, name) for row in rows):
            raise BadInput(
                f"data.columns.{key} = {name!r}: data.train has no such column; its first row has "
                + ", ".join(rows[0].columns)
            )
    rejected = tuple(row for one in sets for row in one.rejected)
    return Problems(
        rows=rows,
        skipped=count_reasons(rejected),
        source=", ".join(one.source for one in sets),
        content_hash=_joint_hash([one.content_hash for one in sets]),
        rejected=rejected,
        notes=tuple(note for one in sets for note in one.notes),
    )


def _paths(config: Config) -> list[str]:
    train = [one.path for one in config.data.sets]
    named = [path for path in config.data.decontaminate if path != BENCHMARK]
    return list(dict.fromkeys(filter(None, [*train, config.data.heldout, *benchmark_paths(config).values(), *named])))


def _evaluation_sets(config: Config, train: Problems, heldout: Problems) -> tuple[list[Problems], tuple[str, ...]]:
    """The sets to compare with, and notes. The training file itself is skipped with a note, because no training row
    would be left."""
    wanted = config.data.decontaminate
    evaluated = list(benchmark_paths(config).values())
    paths = [path for name in wanted for path in (evaluated if name == BENCHMARK else [name])]
    layout = RowFormat.of(config)
    sets = ([heldout] if BENCHMARK in wanted else []) + [read_problems(path, layout) for path in dict.fromkeys(paths)]
    same = [problems for problems in sets if problems is not heldout or config.data.heldout]
    same = [problems for problems in same if problems.content_hash == train.content_hash]
    notes = dict.fromkeys(
        f"{problems.source} is the training set itself: training problems are evaluated" for problems in same
    )
    return [problems for problems in sets if not any(problems is other for other in same)], tuple(notes)


def _without(train: Problems, overlaps: Sequence[Overlap]) -> Problems:
    if not overlaps:
        return train
    rejected = [
        one.row.reject(
            "problem",
            IN_BENCHMARK,
            one.row.problem,
            f"no problem of an evaluation set; {one.share:.0%} of it is {one.other.where}",
        )
        for one in overlaps
    ]
    out = {rejection.where for rejection in rejected}
    if len(overlaps) == len(train.rows):
        raise BadInput(
            f"problem set {train.source}: every row is also in an evaluation set (the first: {rejected[0]}); "
            "give other data, or set data.decontaminate = [] to train on these rows anyway"
        )
    rows = [row for row in train.rows if row.where not in out]
    return with_rows(train, rows, [*train.rejected, *rejected])
