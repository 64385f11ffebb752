"""One of two ranks under an adaptor: what they hear of each other, and what the adaptor has made of Megatron.

Writes a JSON object to the file that the variable REPORT names.
"""

import json
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist

from engine import platform
from engine.trainer.ranks.rank_group import RankGroup


def main():
    with platform.parallel_session(platform.get_platform("cpu"), 0, pipeline=2):
        ranks = RankGroup()
        reduced = torch.tensor([float(ranks.rank)], dtype=torch.float64)
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
        found = {
            "all_reduce of float64": float(reduced),
            "worst": ranks.worst(0.1 + ranks.rank),
            "worst of all": ranks.worst(math.nan if ranks.rank else 1.0, everyone=True),
            "Adam": _adam(),
        }
        Path(os.environ["REPORT"]).write_text(json.dumps(found))


def _adam():
    """The class that Megatron's optimizer is made of."""
    from megatron.core import optimizer

    return f"{optimizer.Adam.__module__}.{optimizer.Adam.__name__}"


if __name__ == "__main__":
    main()
