"""The NPU kernels without an NPU: torch_npu's published signatures, and the documented semantics on a CPU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from engine import platform
from engine.model import build, npu_operators
from engine.model.kernels import npu
from engine.tools.acceptance import comparisons
from support.attention_cases import CASES, HEADS, assert_near_in_bfloat16, assert_same, row_of, shards_of
from support.npu_operators import define, published
from support.torch_npu_wheel import torch_npu_wheel

HOST = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def operators():
    """`torch.ops.npu`, defined from the published signatures."""
    library = define()
    yield torch.ops.npu
    library._destroy()


@pytest.fixture
def on_npu(monkeypatch):
    """Modules that take a tensor of the host for one of an NPU."""
    monkeypatch.setattr(npu_operators, "on_npu", lambda x: True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", HEADS)
def test_the_npu_kernel_equals_the_mask_and_its_gradients(case, heads, on_npu):
    for row in shards_of(row_of(CASES[case])):
        assert_same(npu.attend, row, heads)


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_stays_near(case, on_npu):
    for row in shards_of(row_of(CASES[case])):
        assert_near_in_bfloat16(npu.attend, row, (4, 2))


def test_more_sequences_than_a_call_takes(monkeypatch):
    row = row_of([(2, [1] * 1100)])
    called = []
    whole = npu._options
    monkeypatch.setattr(npu, "_options", lambda some: called.append(len(some.queries)) or whole(some))
    assert_same(npu.attend, row, (2, 1))
    assert called == [1024, 76, 1] * 2  # the row's parts and the one prompt, forward and backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_comparisons_of_the_doctor_pass_on_these_operators(dtype, on_npu, monkeypatch):
    """Among them a whole model, built as for an NPU, and left on the host."""
    called = []
    for name in ("add_rms_norm", "rms_norm", "rms_norm_gradient", "npu_swiglu", "npu_rotate"):
        operator = vars(npu_operators)[name]
        monkeypatch.setattr(npu_operators, name, lambda *a, _o=operator, _n=name: called.append(_n) or _o(*a))
    found = [*comparisons.compare_attention("npu", HOST, dtype), *comparisons.compare_operations(HOST, dtype)]
    found += [*comparisons.compare_experts(HOST, dtype)]
    assert "experts" in [one.what for one in found]
    assert set(called) == {"rms_norm", "npu_rotate", "npu_swiglu"}
    called.clear()
    plain = build.build_model
    as_on_npu = SimpleNamespace(type="npu")
    monkeypatch.setattr(build, "build_model", lambda shape, how: plain(shape, replace(how, device=as_on_npu)))
    monkeypatch.setattr(GPTModel, "to", lambda self, device: self)
    with platform.single_session(platform.get_platform("cpu"), seed=0):
        found += comparisons.compare_model("npu", HOST, dtype)
    assert [one for one in found if not one.right] == []
    assert set(called) == {"add_rms_norm", "rms_norm", "rms_norm_gradient", "npu_swiglu", "npu_rotate"}


@pytest.mark.slow
def test_the_fixture_is_what_the_wheel_ships(tmp_path):
    with torch_npu_wheel(tmp_path) as wheel:
        functions = wheel.read("torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml").decode()
        binary = wheel.read("torch_npu/lib/libtorch_npu.so")
    for signature in published():
        assert f"func: {signature}\n" in functions
    for derivative in ("NpuRmsNormBackward0", "NpuSwigluBackward0"):
        assert derivative.encode() in binary
