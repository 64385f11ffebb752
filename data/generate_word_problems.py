"""Writes the word problems of infra/recipes/smollm2.toml: `python data/generate_word_problems.py [FOLDER]`.

It writes the same bytes each time.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SEED = 2026
TRAIN_ROWS = 2_000
HELDOUT_ROWS = 256
NAMES = (
    *("Anna", "Ben", "Carla", "David", "Eva", "Finn", "Grace", "Hugo"),
    *("Ines", "Jack", "Kate", "Leo", "Mia", "Noah", "Olga", "Tom"),
)
THINGS = ("apples", "books", "coins", "eggs", "marbles", "pens", "plums", "shells", "stamps", "stickers")
MORE = (
    "{name} has {first} {things} and gets {second} more. How many {things} does {name} have now?",
    "{name} has {first} {things} and {other} gives {name} {second} more. How many {things} does {name} have now?",
    "There are {first} {things} in a box. {name} puts {second} more in. How many {things} are in the box now?",
)
FEWER = (
    "{name} has {total} {things} and gives away {second}. How many {things} does {name} have left?",
    "{name} has {total} {things} and loses {second} of them. How many {things} does {name} have left?",
    "There are {total} {things} in a box. {name} takes {second} out. How many {things} are left in the box?",
)


def rows() -> list[dict[str, str]]:
    """All rows (problem, answer), no problem twice; the held-out ones come last. Numbers are 2 … 18."""
    draw = random.Random(SEED)
    found: dict[str, str] = {}
    while len(found) < TRAIN_ROWS + HELDOUT_ROWS:
        first = draw.randint(2, 9)
        second = draw.randint(2, 9)
        name, other = draw.sample(NAMES, 2)
        gets = draw.random() < 0.5
        text = draw.choice(MORE if gets else FEWER)
        words = {"name": name, "other": other, "things": draw.choice(THINGS)}
        problem = text.format(first=first, second=second, total=first + second, **words)
        found[problem] = str(first + second if gets else first)
    return [{"problem": problem, "answer": answer} for problem, answer in found.items()]


def write(folder: Path) -> None:
    """Write word_problems_train.jsonl and word_problems_heldout.jsonl into `folder`."""
    everything = rows()
    for name, part in (("train", everything[:TRAIN_ROWS]), ("heldout", everything[TRAIN_ROWS:])):
        text = "".join(f"{json.dumps(row)}\n" for row in part)
        (folder / f"word_problems_{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
