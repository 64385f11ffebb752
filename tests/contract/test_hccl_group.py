"""The transport hccl without an NPU: it makes torch_npu's process group as the published source declares it.
Nothing is transferred here."""

import ast
import re
import sys
import types
from datetime import timedelta
from pathlib import Path

import pytest

from engine.wire.weights.backends import BACKENDS, Membership
from support.torch_npu_wheel import torch_npu_wheel

SCHEMA = Path(__file__).with_name("hccl_process_group.schema")


def published():
    """{name: words in its brackets or behind its colon}."""
    found = {}
    for line in SCHEMA.read_text().splitlines():
        if match := re.fullmatch(r"([\w.]+)(?:: |\()([^)]*)\)?", line):
            found[match[1]] = [word.strip() for word in match[2].split(",")]
    return found


class Options:
    """Takes the published fields only."""

    def __setattr__(self, name, value):
        assert name in published()["ProcessGroupHCCL.Options"]
        super().__setattr__(name, value)


def test_the_group_is_made_as_the_published_interface_wants_it(monkeypatch):
    calls = []

    def made(*arguments):
        assert len(arguments) == len(published()["ProcessGroupHCCL"])
        calls.append(arguments)
        return "group"

    made.Options = Options
    binding = types.SimpleNamespace(ProcessGroupHCCL=made)
    module = types.ModuleType("torch_npu")
    module._C = types.SimpleNamespace(_distributed_c10d=binding)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    place = Membership(store="store", rank=2, world=4, own="10.0.0.2", timeout_s=7.0)
    assert BACKENDS["hccl"].make(place) == "group"
    ((store, rank, world, options),) = calls
    assert (store, rank, world) == ("store", 2, 4)
    assert options._timeout == timedelta(seconds=7)
    assert options.global_ranks_in_group == [0, 1, 2, 3]  # empty: torch_npu takes it for the default group


@pytest.mark.slow
def test_the_schema_is_what_the_wheel_says(tmp_path):
    with torch_npu_wheel(tmp_path) as wheel:
        tree = ast.parse(wheel.read("torch_npu/_init/registry/distributed.py"))
        library = wheel.read("torch_npu/lib/libtorch_npu.so")
    helper = next(node for node in tree.body if getattr(node, "name", "") == "_new_process_group_hccl_helper")
    calls = [node for node in ast.walk(helper) if isinstance(node, ast.Call)]
    (made,) = (call for call in calls if getattr(call.func, "attr", "") == "ProcessGroupHCCL")
    schema = published()
    assert [argument.id for argument in made.args] == schema["ProcessGroupHCCL"]
    targets = [node.targets[0] for node in ast.walk(helper) if isinstance(node, ast.Assign)]
    assert [target.attr for target in targets if isinstance(target, ast.Attribute)] == schema[
        "ProcessGroupHCCL.Options"
    ]

    def defined(method):
        return f"_ZN8c10d_npu16ProcessGroupHCCL{method}".encode() in library

    assert all(map(defined, schema["has"]))
    assert not any(map(defined, schema["lacks"]))  # so only a broadcast makes the communicator, and nothing aborts it
