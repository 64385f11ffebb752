"""support/parallel/rank.py, with every call of torch.distributed looked at: `python audited_rank.py FOLDER`.

NPUs have no float64, and MindSpeed drops the result of an all_reduce of float64 on any group, so neither may be asked
for. The kinds of calls that were seen are written to FOLDER/collectives-RANK.json.
"""

import json
import os
import sys
from functools import wraps
from pathlib import Path

import torch
import torch.distributed as dist

from support.parallel import rank

CALLS = (
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all_single", "batch_isend_irecv", "broadcast", "recv",
    "reduce", "reduce_scatter_tensor", "send", "_all_gather_base", "_reduce_scatter_base",
)  # fmt: skip
PATCHED = ("megatron.core", "mindspeed", "engine")


class Audit:
    """Which functions were called with which types of tensors, on groups of the host and of the device."""

    def __init__(self):
        self.seen = set()
        self._host = set()
        make = dist.new_group

        @wraps(make)
        def new_group(*args, **options):
            group = make(*args, **options)
            if options.get("backend") == "gloo":
                self._host.add(group)
            return group

        dist.new_group = new_group
        for name in CALLS:
            self._replace(name, getattr(dist, name))

    def _replace(self, name, function):
        """The function, also in the modules that import it by name."""
        call = self._looked_at(name, function)
        for module in [dist, *(module for key, module in sys.modules.items() if key.startswith(PATCHED))]:
            for key in [key for key, value in vars(module).items() if value is function]:
                setattr(module, key, call)

    def _looked_at(self, name, function):
        @wraps(function)
        def call(*args, **options):
            on_host = options.get("group") in self._host
            for tensor in _tensors([*args, *options.values()]):
                self.seen.add((name, str(tensor.dtype), "host" if on_host else "device"))
                if tensor.dtype is torch.float64 and (not on_host or name == "all_reduce"):
                    raise TypeError(f"{name} of float64 on a group of the {'host' if on_host else 'device'}")
            return function(*args, **options)

        return call


def _tensors(values):
    for value in values:
        if torch.is_tensor(value):
            yield value
        elif isinstance(value, dist.P2POp):
            yield value.tensor
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def main():
    audit = Audit()
    rank.main()
    path = Path(sys.argv[1]) / f"collectives-{os.environ['RANK']}.json"
    path.write_text(json.dumps(sorted(audit.seen)))


if __name__ == "__main__":
    main()
