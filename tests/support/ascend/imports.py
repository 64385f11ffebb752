"""What MindSpeed's adaptor imports: `python imports.py REPORT`, with METRONOME_MINDSPEED as on_host.py.

Writes a JSON object: "imported", the packages that modules of MindSpeed import while the adaptor is loaded and that are
not the standard library's; "without", by package without which engine.platform.npu can't load the adaptor, the error.
"""

import builtins
import json
import os
import sys
import traceback
from pathlib import Path

from engine.errors import BadInput
from engine.platform.npu import Npu
from support.ascend import stand_ins

OURS = {"mindspeed", "megatron"}
DUMMY = "mindspeed.dummy_module.py"
"""The file of modules that the adaptor makes up."""


def main():
    sys.path.insert(1, os.environ["METRONOME_MINDSPEED"])
    stand_ins.install()
    imported = in_a_child(record)
    without = {name: in_a_child(load_without, name) for name in imported}
    found = {"imported": imported, "without": {name: error for name, error in without.items() if error}}
    Path(sys.argv[1]).write_text(json.dumps(found))


def in_a_child(function, *arguments):
    """The function's result in a process of its own: the adaptor is loaded once in each."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            with os.fdopen(writing, "w") as pipe:
                pipe.write(json.dumps(function(*arguments)))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = json.loads(pipe.read())
    os.wait()
    return found


def record():
    """The packages, sorted; those whose import fails, which MindSpeed then does without, are left out."""
    found = set()
    real = builtins.__import__

    def imported(*args, **options):
        module = real(*args, **options)
        if len(args) < 5:  # a call of __import__, and not an import statement
            return module
        name, asks, *_, level = args
        package = name.partition(".")[0]
        ours = level == 0 and (asks or {}).get("__name__", "").startswith("mindspeed.")
        if ours and getattr(sys.modules[package], "__file__", "") != DUMMY:
            found.add(package)
        return module

    builtins.__import__ = imported
    Npu().adapt_megatron()
    return sorted(found - OURS - set(sys.stdlib_module_names))


def load_without(package):
    """The error of loading the adaptor where the package is not installed, None where it loads."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        sys.modules[name] = None
    sys.modules[package] = None
    try:
        Npu().adapt_megatron()
    except BadInput as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    main()
