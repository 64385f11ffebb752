"""Checkpoints saved in one layout and loaded in another, of 1, 2 or 4 ranks, and a kill -9 of all while one is written.

What the ranks do is in checkpoints_rank.py.
"""

import sys

import pytest

from support.parallel.checkpoints import models, run, started, until
from support.parallel.checkpoints_rank import CASES, TP2, world
from support.runs import ROOT

RANK = ROOT / "tests/support/parallel/checkpoints_rank.py"
COMMAND = (sys.executable, "-W", "ignore", str(RANK))


@pytest.mark.parallel
@pytest.mark.timeout(400)
def test_layouts_and_a_kill_while_writing(tmp_path):
    models(tmp_path)
    with started((*COMMAND, "first"), tmp_path, 3 * len(CASES) + 1, max(world(one) for _, one, _ in CASES)) as first:
        until(lambda: all((tmp_path / f"writing-{rank}").exists() for rank in range(world(TP2))), first, tmp_path, 300)
    assert not (tmp_path / "killed/step-000002").exists()
    assert (tmp_path / "killed/.step-000002.partial/__0_0.distcp").stat().st_size > 100_000
    run((*COMMAND, "second"), tmp_path, sessions=1, count=world(TP2), timeout_s=80)
