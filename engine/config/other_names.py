"""What TRL and verl call the keys of a recipe, for the message about an unknown key.

The names are those of docs/coming_from.md. `python -m engine.config.other_names > engine/config/other_names.json` reads
that page again.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from engine.config.table import keys_in
from engine.config.tree import Tree

FILE = Path(__file__).with_name("other_names.json")
SHORT = ("n", "name", "path", "device", "tensor_model_parallel_size")
"""Last parts of names that mean little without the part before."""
KEYS = frozenset(keys_in(Tree))
"""Our keys."""
_NAME = re.compile(r"[a-z][A-Za-z0-9_.]*")


def read_names(page: str) -> dict[str, str]:
    """The names in the table "Side by side" of the page docs/coming_from.md, with as many of their parts as make them
    clear → our key, or the words of our column. A name that has a cell for itself counts before one that shares it."""
    table = page.partition("## Side by side")[2].partition("\n## ")[0]
    alone: dict[str, str] = {}
    shared: dict[str, str] = {}
    for line in table.splitlines():
        if not line.startswith("| ") or line.startswith("| |"):
            continue
        *others, ours = line.strip("| ").split(" | ")[1:]
        for cell in others:
            names = _names_in(cell)
            for name in names:
                parts = name.split(".")
                clear = ".".join(parts[-2:] if parts[-1] in SHORT else parts[-1:])
                (alone if len(names) == 1 else shared).setdefault(clear, _plain(ours))
    return {name: ours for name, ours in sorted((shared | alone).items()) if name not in KEYS}


def _names_in(cell: str) -> list[str]:
    """The identifiers of a cell: neither values (after "=" or in brackets) nor arguments of a function."""
    code = re.findall(r"`([^`]+)`", re.sub(r"\(.*?\)", "", cell))
    return [name for name in (text.partition(" = ")[0] for text in code) if _NAME.fullmatch(name)]


def _plain(cell: str) -> str:
    """A cell without Markdown; only the key, if it is all that stands there beside a link."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell).replace("`", "")
    first = text.partition(" (")[0]
    return first if first in KEYS else text


OTHER_NAMES: Mapping[str, str] = json.loads(FILE.read_text())
"""The names of other libraries, as `read_names` returns them."""


def find_other_name(key: str) -> str:
    """What a dotted key of another library means here: one of `KEYS`, or what the page says; "" if unknown.

    The longest end of the key counts ("actor_rollout_ref.rollout.n" as "rollout.n"), else one of its tables.
    """
    parts = key.split(".")
    ends = [".".join(parts[start:]) for start in range(len(parts))]
    for name in [*ends, *parts[:-1]]:
        if found := OTHER_NAMES.get(name) or (name if name in KEYS and name != key else ""):
            return found
    return ""


if __name__ == "__main__":
    names = read_names((Path(__file__).parents[2] / "docs/coming_from.md").read_text())
    sys.stdout.write(json.dumps(names, indent=1, ensure_ascii=False) + "\n")
