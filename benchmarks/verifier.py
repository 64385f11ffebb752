"""Tests the math verifier on real answers: 20 spellings of each should match, changed answers should not, and hostile
strings should not hang it.

    python benchmarks/verifier.py [FOLDER_OR_FILES...] [--rows N] [--hostile N] [--show N]

Each call goes through the verifier processes of a run, with their limits of time and memory. Figures are per row of the
files (equal answers are tried once). The spellings, changed answers and hostile strings are in
`tests/support/spellings.py`, `changed_answers.py` and `hostile_strings.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from common import result

from engine.config import Reward
from engine.config.recipe import HOME
from engine.data.problems import read_problems
from engine.orchestrator.workers.verifier_pool import VerifierPool
from engine.types import Prompt, Response, Score

sys.path.insert(0, str(HOME / "tests"))
from support.changed_answers import changed  # noqa: E402
from support.hostile_strings import hostile  # noqa: E402
from support.spellings import SPELLINGS, bare  # noqa: E402

TIMEOUT_S = 10.0
"""The default of reward.timeout_s."""


class Asker:
    """Calls the pool, several calls at a time. Records the slowest call (seconds) and the number that hit the limit."""

    def __init__(self, pool: VerifierPool) -> None:
        self._pool = pool
        self._turn = asyncio.Semaphore(8)
        self.slowest = 0.0
        self.timeouts = 0

    async def __call__(self, answer: str, text: str) -> Score:
        """The score of a response with this text."""
        async with self._turn:
            started = time.monotonic()
            score = (
                await self._pool.score(
                    Prompt("id", "", answer, ()),
                    [
                        Response(
                            token_ids=(),
                            logprobs=(),
                            versions=(),
                            loss_mask=(),
                            finish_reason="stop",
                            text=text,
                            seed=0,
                            instance="",
                        )
                    ],
                )
            )[0]
            self.slowest = max(self.slowest, time.monotonic() - started)
            self.timeouts += score.status == "timeout"
            return score


async def spellings(ask: Asker, answers: Counter[str], show: int) -> dict[str, Any]:
    """The share of rows of which all spellings match, and the number of changed answers that were tried and that
    match."""
    failed: Counter[str] = Counter()
    wrong: list[str] = []
    missed: list[str] = []
    changes = 0

    async def try_one(answer: str, rows: int) -> None:
        nonlocal changes
        given = bare(answer)
        for name, spell in SPELLINGS.items():
            if (await ask(answer, spell(given))).value != 1:
                failed[name] += rows
                missed.append(answer)
                _show(show, f"missed {answer!r} as {name}: {spell(given)!r}")
        for what, text in changed(answer):
            changes += rows
            if (await ask(answer, f"\\boxed{{{text}}}")).value != 0:
                wrong.append(answer)
                _show(show, f"WRONG {answer!r} matched {what}: {text!r}")

    await asyncio.gather(*(try_one(answer, rows) for answer, rows in answers.items()))
    rows = answers.total()
    lost = sum(answers[answer] for answer in set(missed))
    return {
        "rows": rows,
        "answers": len(answers),
        "all_spellings": round(1 - lost / rows, 5),
        "changes": changes,
        "changes_matched": sum(answers[answer] for answer in wrong),
        "failed": dict(failed.most_common()),
    }


async def hostility(ask: Asker, count: int) -> dict[str, Any]:
    """Use hostile strings as responses to ordinary answers. Returns how many scored, hit the limit and failed, and the
    slowest in seconds."""
    answers = ["7", "\\frac{1}{2}", "(1, 2)", "x^2+1", "[0,\\infty)", "2^{10}", "\\sqrt{2}", "1,2,3"]
    statuses: Counter[str] = Counter()

    async def try_one(number: int, text: str) -> None:
        score = await ask(answers[number // 8 % len(answers)], text)  # eight kinds of strings, each with every answer
        statuses[score.status if score.status != "ok" else f"scored {score.value:g}"] += 1

    started = time.monotonic()
    await asyncio.gather(*(try_one(number, text) for number, text in enumerate(hostile(count))))
    seconds = round(time.monotonic() - started, 1)
    return {
        "strings": count,
        "seconds": seconds,
        "slowest_s": round(ask.slowest, 2),
        "timeouts": ask.timeouts,
        **statuses,
    }


@contextmanager
def memory() -> Iterator[list[float]]:
    """Peak memory in MiB of the largest child process, from its high-water mark, which is read 20 times a second."""
    peak = [0.0]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            peak[0] = max([peak[0], *map(_high_water, psutil.Process().children(recursive=True))])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join(1.0)


def _high_water(process: psutil.Process) -> float:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0.0)


def _show(show: int, line: str) -> None:
    if show:
        print(line, flush=True)


def _answers(file: Path, rows: int) -> Counter[str]:
    found = [row.answer for row in read_problems(str(file)).rows]
    return Counter(random.Random(0).sample(found, min(rows, len(found))) if rows else found)


async def run(files: Sequence[Path], rows: int, strings: int, show: int) -> dict[str, Any]:
    """Run all parts. The tests call this, too."""
    figures: dict[str, Any] = {}
    with memory() as peak:
        async with VerifierPool(Reward(function="math", workers=2, timeout_s=TIMEOUT_S, on_error="zero")) as pool:
            for file in files:
                ask = Asker(pool)
                started = time.monotonic()
                found = await spellings(ask, _answers(file, rows), show)
                seconds = round(time.monotonic() - started, 1)
                figures[file.stem] = {
                    **found,
                    "timeouts": ask.timeouts,
                    "slowest_s": round(ask.slowest, 2),
                    "seconds": seconds,
                }
                print(file.stem, figures[file.stem], flush=True)
            if strings:
                figures["hostile"] = await hostility(Asker(pool), strings)
    return {**figures, "worker_peak_mib": round(peak[0])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--rows", type=int, default=0, help="number of rows of each file, drawn at random; 0 takes all")
    parser.add_argument("--hostile", type=int, default=10_000)
    parser.add_argument("--show", type=int, default=0, help="1 prints each miss")
    given = parser.parse_args()
    files = [file for path in given.paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    result(asyncio.run(run(files, given.rows, given.hostile, given.show)))


if __name__ == "__main__":
    main()
