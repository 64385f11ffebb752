"""One rank of the checkpoint tests of this adaptor: `python checkpoint_rank.py WHAT CASE FOLDER PORT...`.

CASE is one of support/parallel/checkpoints_rank.py. WHAT is "here" for its first two steps in the layout that saves,
"there" for the third in the other, or "both" and then back again.
"""

import sys
from pathlib import Path

import torch

from support.parallel import checkpoints_rank as ranks


def main():
    torch.set_num_threads(1)
    what, name, folder, *ports = sys.argv[1:]
    folder = Path(folder)
    one, other = next((one, other) for case, one, other in ranks.CASES if case == name)
    if what == "both":
        ranks.there_and_back(folder=folder, name=name, one=one, other=other, ports=ports)
        return
    with ranks.ranks(one if what == "here" else other, ports) as mine:
        if mine and what == "here":
            ranks.here(folder, name, one)
        elif mine:
            ranks.there(folder, name, other, 1e-5)


if __name__ == "__main__":
    main()
