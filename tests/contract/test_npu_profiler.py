"""The profiler of an NPU against the signatures in torch_npu's wheel."""

import ast
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.platform.npu import Npu
from support.torch_npu_wheel import torch_npu_wheel

SOURCE = "torch_npu/profiler/profiler.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def signature(node):
    """The parameters of a function in the source, without defaults that it would have to compute."""
    kind = inspect.Parameter
    groups = ((node.args.args, kind.POSITIONAL_OR_KEYWORD), (node.args.kwonlyargs, kind.KEYWORD_ONLY))
    names = [(one.arg, how) for group, how in groups for one in group if one.arg != "self"]
    return inspect.Signature([kind(name, how, default=None) for name, how in names])


def test_the_calls_fit_the_published_signatures(monkeypatch, tmp_path):
    with torch_npu_wheel(tmp_path) as wheel:
        tree = ast.parse(wheel.read(SOURCE))
        exported = wheel.read("torch_npu/profiler/__init__.py").decode()
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    made = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "profile")
    methods = {node.name: node for node in made.body if isinstance(node, ast.FunctionDef)}
    given = []

    def calls(name, node):
        def call(*args, **kwargs):
            given.append((name, signature(node).bind(*args, **kwargs).arguments))
            return name

        return call

    profiler = SimpleNamespace(
        profile=calls("profile", methods["__init__"]),
        tensorboard_trace_handler=calls("handler", functions["tensorboard_trace_handler"]),
        ProfilerActivity=SimpleNamespace(CPU="CPU", NPU="NPU"),
    )
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(profiler=profiler))
    assert Npu().profiler(Path("/run/profile"), "rank-3") == "profile"
    assert given == [
        ("handler", {"dir_name": "/run/profile", "worker_name": "rank-3"}),
        ("profile", {"activities": ["CPU", "NPU"], "on_trace_ready": "handler"}),
    ]
    assert {"start", "stop"} <= methods.keys()
    assert all(name in exported for name in vars(profiler))
