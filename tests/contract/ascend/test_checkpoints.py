"""Checkpoints under MindSpeed's adaptor, which replaces how Megatron loads optimizers: saved, loaded in the same layout
and in another, and from a machine without NPUs."""

import pytest

from support.parallel.checkpoints import models, run
from support.runs import ROOT

pytestmark = [pytest.mark.ascend, pytest.mark.timeout(200)]

RANK = str(ROOT / "tests/support/ascend/checkpoint_rank.py")
SECONDS = 160


@pytest.mark.parametrize("case", ["dp2shared-tp2", "ep2shared-dp2-moe"])
def test_there_and_back(case, on_host, tmp_path):
    """The same layout goes on bit for bit, as checkpoints_rank.py checks; another one with all weights and moments."""
    models(tmp_path)
    run([*on_host["mindspeed"], RANK, "both", case], tmp_path, sessions=3, count=2, timeout_s=SECONDS)


def test_a_checkpoint_of_plain_megatron_is_resumed(on_host, tmp_path):
    """Weights, old policy and moments bit for bit; the next gradient and its norm to rounding."""
    models(tmp_path)
    for adaptor, what in (("plain", "here"), ("mindspeed", "there")):
        run([*on_host[adaptor], RANK, what, "tp2-dp2"], tmp_path, sessions=1, count=2, timeout_s=SECONDS)
