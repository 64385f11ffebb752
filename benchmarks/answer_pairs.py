"""Compares three readers on pairs of answers and on stated answers: an earlier checkout, math-verify alone, and ours.

    python benchmarks/answer_pairs.py [--before CHECKOUT] [--show N]

The pairs are those of the tests (`tests/support/same_answers.py`, `other_answers.py`), the statements those of
`tests/support/statements.py`. A pair is one gold answer and one response with the other answer in a box; a statement is
a whole response. Counts: right, wrong answers that were accepted, right answers that were refused, errors, seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
LIMIT_S = 10
"""Default of reward.timeout_s: a verdict that takes longer counts as 0, as in a run."""

CHILD = """
import json, signal, sys, time
from engine.reward.verifiers import BUILT_IN
from engine.types import Prompt, Response
def late(*_): raise TimeoutError
signal.signal(signal.SIGALRM, late)
reward = BUILT_IN[sys.argv[1]]
for line in sys.stdin:
    gold, text = json.loads(line)
    response = Response(token_ids=(), logprobs=(), versions=(), loss_mask=(), finish_reason="stop", text=text, seed=0,
                        instance="")
    started = time.process_time()
    signal.alarm(%d)
    try:
        value = reward(Prompt("", "", gold, ()), response).value
    except Exception as error:
        value = type(error).__name__
    signal.alarm(0)
    print(json.dumps([value, time.process_time() - started]), flush=True)
"""


def cases() -> Iterator[tuple[str, str, str, int]]:
    """Table, gold answer, response and right verdict, both ways round for pairs."""
    sys.path.insert(0, str(HOME / "tests"))
    from support.other_answers import DIFFERENT, NOT_LISTED
    from support.same_answers import LISTED, NOT_READ, SAME
    from support.statements import NOT_STATED, STATED

    for verdict, tables in ((1, {**SAME, "not read": NOT_READ}), (0, DIFFERENT)):
        for pairs in tables.values():
            for one, other in pairs:
                yield "pairs", one, f"\\boxed{{{other}}}", verdict
                yield "pairs", other, f"\\boxed{{{one}}}", verdict
    for verdict, texts in ((1, LISTED), (0, NOT_LISTED)):
        yield from (("boxes", gold, text, verdict) for gold, text in texts)
    for verdict, texts in ((1, STATED), (0, NOT_STATED)):
        yield from (("statements", gold, text, verdict) for gold, text in texts)


def measure(
    checkout: Path, reward: str, asked: list[tuple[str, str, str, int]], show: int
) -> dict[str, dict[str, float]]:
    """Counts of each table for one reward of one checkout, in a process of its own."""
    lines = "".join(json.dumps([gold, text]) + "\n" for _, gold, text, _ in asked)
    done = subprocess.run(
        [sys.executable, "-c", CHILD % LIMIT_S, reward],
        input=lines,
        cwd=checkout,
        env={"PYTHONPATH": str(checkout), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, dict[str, float]] = {}
    for (table, gold, text, verdict), line in zip(asked, done.stdout.splitlines(), strict=True):
        value, seconds = json.loads(line)
        row = found.setdefault(
            table, {"right": 0, "wrong_accepted": 0, "right_refused": 0, "errors": 0, "seconds": 0.0}
        )
        kind = "right" if value == verdict else "wrong_accepted" if value == 1 else "right_refused"
        row[kind if not isinstance(value, str) or verdict else "right"] += 1
        row["errors"] += isinstance(value, str)
        row["seconds"] = round(row["seconds"] + seconds, 3)
        if show and value != verdict:
            print(f"{reward} of {checkout.name}: {gold!r} for {text!r} is {value}, not {verdict}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit")
    parser.add_argument("--show", type=int, default=0, help="1 prints each wrong verdict")
    given = parser.parse_args()
    asked = [*cases()]
    started = time.monotonic()
    readers = {"ours": (HOME, "math"), "math_verify": (HOME, "math_verify")}
    if given.before:
        readers["before"] = (given.before.resolve(), "math")
    found = {name: measure(checkout, reward, asked, given.show) for name, (checkout, reward) in readers.items()}
    print("RESULT", json.dumps({"cases": len(asked), "wall_s": round(time.monotonic() - started, 1), **found}))


if __name__ == "__main__":
    main()
