"""The trainer's packages on a machine with NPUs. Needs no MindSpeed: test_adaptor.py says what MindSpeed imports."""

import re

import pytest

from engine.platform.npu import MINDSPEED_NEEDS
from support.runs import ROOT

LIST = ROOT / "infra/trainer/npu.txt"
PACKAGES = {"einops": "einops", "triton": "triton-ascend"}
"""The package that brings a module."""


def test_the_list_has_what_mindspeed_imports():
    if not LIST.exists():
        pytest.skip(f"there is no {LIST.relative_to(ROOT)}")
    listed = {re.split(r"[=<>@; \[]", line)[0].lower() for line in LIST.read_text().splitlines()}
    assert {PACKAGES[module] for module in MINDSPEED_NEEDS} <= listed
