"""MindSpeed's real adaptor on the host against plain Megatron: one step of real ranks over gloo, in every layout.

Log-probabilities, losses and gradients are equal bit for bit: MindSpeed replaces nothing that computes them here. It
does replace the sum of the gradient's norm, which adds up in another order, and Adam. So the norm and the weights after
the update agree to rounding only.
"""

from dataclasses import replace

import pytest
import torch

from support.ascend.compared import Compared, different
from support.parallel.layouts import CASES, controlled, held, sequences
from support.runs import ROOT

pytestmark = [pytest.mark.ascend, pytest.mark.timeout(360)]

AUDITED = ROOT / "tests/support/ascend/audited_rank.py"
SECONDS = {1: 120, 2: 150, 4: 200}
"""Deadline of all cases of a world size, for one adaptor."""
UPDATE = {"train.learning_rate": 1e-2}
"""An update that is seen in every weight."""
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
"""Of weights after the update, relative; in bf16 the two may be rounded to neighbours."""

NAMES = (
    "one-qwen3-shared-packed-tied-1.0", "one-qwen2-shared-packed-untied-0.7", "one-llama-separate-packed-untied-1.0",
    "recompute", "offload", "bf16", "ep2-one-rank", "control-one",
    "tp2-qwen3-shared-packed-tied-1.0", "tp2sp-qwen3-separate-small-untied-0.7", "pp2-qwen3-shared-packed-tied-1.0",
    "cp2-qwen3-shared-packed-tied-1.0", "dp2-qwen3-shared-packed-tied-1.0", "ep2-dp2-odd", "ep2-tp2sp", "ep2-cp2",
    "recompute-tp2sp", "recompute-pp2", "bf16-tp2sp", "whole-dp2", "sharded-dp2", "control-sharded-dp2",
    "held-m2po-dp2", "gspo-cp2",
    "tp2pp2sp-qwen3-shared-packed-tied-1.0", "tp2cp2sp-qwen3-shared-packed-tied-1.0", "sharded-tp2dp2", "ep2-pp2dp2",
)  # fmt: skip
"""Of the parallel tests' cases: each axis, pairs of axes, and options of the trainer that MindSpeed's patches meet."""

EVERY = {case.name: case for case in [*CASES, *controlled(), *held(), *sequences()]}
CHOSEN = [replace(EVERY[name], settings=UPDATE | EVERY[name].settings) for name in NAMES]


@pytest.fixture(scope="module")
def outcomes(on_host, tmp_path_factory, request):
    """Looks a case's outcome up, by adaptor; runs a world size at the first question, all its selected cases."""
    folder = tmp_path_factory.mktemp("training")
    worlds = {adaptor: Compared(folder, (*command, str(AUDITED))) for adaptor, command in on_host.items()}
    selected = {item.callspec.params["case"].name for item in request.session.items if item.module is request.module}
    found = {}

    def both(case):
        if ("plain", case.name) not in found:
            cases = [one for one in CHOSEN if one.world == case.world and one.name in selected]
            for adaptor, world in worlds.items():
                outcomes = world.run(sorted(cases, key=lambda one: str(one.layout)), SECONDS[case.world])
                found.update({(adaptor, name): outcome for name, outcome in outcomes.items()})
        return [found[adaptor, case.name].ranks() for adaptor in ("plain", "mindspeed")]

    return both


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_mindspeed_changes_no_number_of_a_step(case, outcomes):
    for plain, adapted in zip(*outcomes(case), strict=True):
        assert plain["gradients"] or case.world > 1
        assert different({key: plain[key] for key in EXACT}, {key: adapted[key] for key in EXACT}) == []
        assert adapted["norm"] == pytest.approx(plain["norm"], rel=1e-6)
        assert adapted["weights"].keys() == plain["weights"].keys()
        for name, weight in plain["weights"].items():
            tolerance = TOLERANCE[weight.dtype]
            torch.testing.assert_close(adapted["weights"][name], weight, rtol=tolerance, atol=tolerance, msg=name)


EXACT = ("stage", "gradients", "logprobs", "figures", "turned")
