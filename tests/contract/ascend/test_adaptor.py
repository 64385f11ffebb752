"""What MindSpeed's adaptor wants to find, and what ranks under it hear of each other."""

import json
import math
import subprocess
import sys

import pytest

from engine.platform.npu import MINDSPEED_NEEDS
from support.parallel.two_ranks import reports
from support.runs import ROOT

pytestmark = [pytest.mark.ascend, pytest.mark.timeout(240)]

SUPPORT = ROOT / "tests/support/ascend"
WITH_METRONOME = {"numpy", "packaging", "scipy", "torch"}
WITH_TORCH_NPU = {"torch_npu", "torchair"}


@pytest.fixture(scope="module")
def imports(on_host, tmp_path_factory):
    report = tmp_path_factory.mktemp("imports") / "imports.json"
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "imports.py"), str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(report.read_text())


def test_the_adaptor_imports_these_packages_and_no_others(imports):
    assert set(imports["imported"]) == {*MINDSPEED_NEEDS, *WITH_METRONOME, *WITH_TORCH_NPU}


@pytest.mark.parametrize("module", MINDSPEED_NEEDS)
def test_without_one_of_them_the_error_names_it(module, imports):
    assert imports["without"][module] == (
        f'platform.device = "npu": mindspeed can\'t be imported without the module {module}'
    )


def test_ranks_agree_on_the_worst_value_though_mindspeed_drops_reductions_of_float64(on_host, tmp_path):
    """And options of this process's command line are not MindSpeed's."""
    options = ["--optimizer-selection", "fused_torch_adamw"]
    found = reports(tmp_path, [*on_host["mindspeed"], str(SUPPORT / "agreement_rank.py"), *options])
    assert [rank["all_reduce of float64"] for rank in found] == [0.0, 1.0]  # not [1.0, 1.0]
    assert [rank["worst"] for rank in found] == [1.1, 1.1]
    assert [rank["worst of all"] for rank in found] == [math.inf, math.inf]
    assert {rank["Adam"] for rank in found} == {"mindspeed.core.optimizer.adamw.AdamW"}
