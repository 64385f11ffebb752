"""The comparison of kernels with their references: right ones pass, and one made wrong is named."""

from types import SimpleNamespace

import pytest
import torch

from engine import platform
from engine.model.kernels import KERNELS
from engine.model.kernels.reference import masked_attention
from engine.tools.acceptance import device_parts
from engine.tools.acceptance.comparisons import compare_attention, compare_operations
from engine.tools.acceptance.notes import Notes, NoteWriter, PartFailed, PartTask

HOST = torch.device("cpu")


@pytest.fixture
def task(tmp_path):
    return PartTask(platform="cpu", settings=(), folder=tmp_path, notes=NoteWriter(tmp_path / "kernels.jsonl"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_and_the_fused_operations_are_right(dtype):
    found = [*compare_attention("cpu", HOST, dtype), *compare_operations(HOST, dtype)]
    assert [one for one in found if not one.right] == []
    assert {name for one in found for name in one.errors} == {"output", "dq", "dk", "dv", "dx", "dweight"}
    assert max(max(one.errors.values()) for one in found) > 0


def test_a_kernel_that_is_wrong_is_named_and_the_others_are_compared(task, monkeypatch):
    def too_large(q, k, v, layout, scale=None):
        return 1.1 * masked_attention(q, k, v, layout)

    monkeypatch.setattr("engine.tools.acceptance.comparisons.compare_model", lambda *a: iter(()))  # seconds
    monkeypatch.setitem(KERNELS, "cpu", too_large)
    with pytest.raises(PartFailed, match="attention cpu, float32; .*attention cpu, bfloat16"):
        device_parts.kernels(task)
    lines = Notes.read(task.folder / "kernels.jsonl").lines
    assert any(line.startswith("attention cpu, float32") and line.endswith("WRONG") for line in lines)
    assert any(line.startswith("RMSNorm, bfloat16") and not line.endswith("WRONG") for line in lines)


def rounded(bits):
    """The reference, whose inputs and gradients have so many bits of mantissa. Its products round less than a kernel
    whose every operand is rounded."""

    def cut(x):
        step = 1 << (23 - bits)
        return (x.detach().contiguous().view(torch.int32) + step // 2).div(step, rounding_mode="floor").mul(step)

    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return cut(x).view(torch.float32)

        backward = forward

    return lambda q, k, v, layout, scale=None: Cut.apply(
        masked_attention(Cut.apply(q), Cut.apply(k), Cut.apply(v), layout)
    )


@pytest.mark.parametrize(("bits", "right"), [(11, True), (7, False)])
def test_the_fused_attention_of_an_npu_may_round_fp32_to_hf32_but_not_to_bf16(monkeypatch, bits, right):
    monkeypatch.setitem(KERNELS, "npu", rounded(bits))
    found = list(compare_attention("npu", HOST, torch.float32))
    assert [one.right for one in found] == [right, right]
    assert all(max(one.errors.values()) > 1e-4 for one in found)  # the limit of every other kernel


@pytest.mark.parametrize(("name", "said"), [("npu", "all comparisons in bf16 are right"), ("cpu", None)])
def test_where_only_fp32_is_wrong_it_is_said_what_that_means(task, monkeypatch, name, said):
    """On a device, which trains in bf16."""

    def less_exact(q, k, v, layout, scale=None):
        return masked_attention(q, k, v, layout) * (1.01 if q.dtype == torch.float32 else 1.0)

    monkeypatch.setattr("engine.tools.acceptance.comparisons.compare_model", lambda *a: iter(()))  # seconds
    monkeypatch.setitem(KERNELS, "cpu", less_exact)
    monkeypatch.setattr(device_parts, "complete_platform", lambda given: SimpleNamespace(name=name, attention="cpu"))
    single = platform.single_session
    monkeypatch.setattr(platform, "single_session", lambda machine: single(platform.PLATFORMS["cpu"]))
    with pytest.raises(PartFailed, match="attention cpu, float32; attention cpu, prompt not shared, float32: dif") as e:
        device_parts.kernels(task)
    assert e.value.remedy.startswith(said) if said else not e.value.remedy


def test_a_kernel_that_raises_is_named(task, monkeypatch):
    def absent(*arguments):
        raise NotImplementedError("no such operator\nC++ trace")

    for name in ("compare_model", "compare_operations"):
        monkeypatch.setattr(f"engine.tools.acceptance.comparisons.{name}", lambda *a: iter(()))
    monkeypatch.setitem(KERNELS, "cpu", absent)
    with pytest.raises(PartFailed, match="attention cpu, float32 raised NotImplementedError: no such operator;"):
        device_parts.kernels(task)


def test_a_device_that_computes_wrongly_is_named(task, monkeypatch):
    monkeypatch.setattr(torch, "equal", lambda a, b: False)
    with pytest.raises(PartFailed, match="device 0: MetronomeError: cpu: 0 of 1048576 entries"):
        device_parts.devices(task)
