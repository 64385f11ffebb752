"""Writes the quickstart's problem sets, the same bytes each time: `python data/generate_addition.py [FOLDER]`."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from engine.tools.quickstart_model.addition import worked

SEED = 2025
TRAIN_ROWS = 4_500
HELDOUT_ROWS = 512


def rows() -> list[dict[str, str]]:
    """All rows in DeepScaleR's schema (problem, answer, solution), no problem twice; the held-out ones come last."""
    draw = random.Random(SEED)
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < TRAIN_ROWS + HELDOUT_ROWS:
        pairs[draw.randint(100, 999), draw.randint(100, 999)] = None
    return [{"problem": f"{a}+{b}=", "answer": str(a + b), "solution": worked(a, b)} for a, b in pairs]


def write(folder: Path) -> None:
    """Write addition_train.jsonl and addition_heldout.jsonl into `folder`."""
    everything = rows()
    for name, part in (("train", everything[:TRAIN_ROWS]), ("heldout", everything[TRAIN_ROWS:])):
        text = "".join(f"{json.dumps(row)}\n" for row in part)
        (folder / f"addition_{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
