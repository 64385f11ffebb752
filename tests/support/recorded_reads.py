"""Records which keys of the configuration the processes of a command read.

A copy of this file, called sitecustomize.py and in a folder of PYTHONPATH, is run by every Python process as it starts.
It writes each key that the process reads to reads/ in that folder, as "Table.key" on a line of its own. Rules between
keys, and the question which keys have no effect, read keys without using them: they do not count.
"""

import os
import sys
from pathlib import Path

UNUSED = ("engine/config/rules.py", "engine/config/no_effect.py")


def _is_check(frame):
    """Whether a rule, a validator of a table or `without_effect` is under way."""
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith(UNUSED) or ("engine/config/" in file and name.startswith(("_check", "_join", "_replace"))):
            return True
        frame = frame.f_back
    return False


def install(folder):
    try:
        from engine.config.table import Table
    except ImportError:  # an interpreter without Metronome
        return
    folder.mkdir(exist_ok=True)
    seen = set()
    plain = Table.__getattribute__

    def read(self, name):
        kind = type(self)
        if (
            name[0] != "_"
            and (kind, name) not in seen
            and name in kind.model_fields
            and not _is_check(sys._getframe(1))
        ):
            seen.add((kind, name))
            with (folder / str(os.getpid())).open("a") as file:
                file.write(f"{kind.__name__}.{name}\n")
        return plain(self, name)

    Table.__getattribute__ = read


if __name__ == "sitecustomize":
    install(Path(__file__).parent / "reads")
