"""The NPU kernel without an NPU: torch_npu's published signature with the documented semantics behind it, on a CPU."""

import pytest
import torch

from engine.model.attention import SegmentAttention, params
from engine.model.kernels import npu
from engine.model.kernels.reference import masked
from engine.model.layout import layout
from support.npu_operator import define, published
from support.torch_npu_wheel import torch_npu_wheel

CASES = {
    "ragged": [(5, [3, 7, 1])],
    "empty and equal": [(4, [6, 0, 6, 2])],
    "several groups": [(3, [2, 2]), (1, [5]), (7, [1, 4])],
    "one token": [(1, [1])],
    "only empty": [(3, [0, 0])],
    "longer than a block": [(70, [90, 1, 33])],
}


@pytest.fixture(scope="module", autouse=True)
def operator():
    """`torch.ops.npu.npu_fusion_attention`, defined from the published signature."""
    library = define()
    yield torch.ops.npu.npu_fusion_attention
    library._destroy()


def rows(case):
    row = layout([([0] * prompt, [[0] * n for n in lengths]) for prompt, lengths in CASES[case]])
    aligned = row.aligned(4)
    return [row, aligned.shard(0, 2), aligned.shard(1, 2)]


def results(kernel, row, heads, scale=None):
    generator = torch.Generator().manual_seed(0)
    shapes = [(row.size, heads[0], 16), (row.row_size, heads[1], 16), (row.row_size, heads[1], 16)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    weight = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    out = kernel(*inputs, row, scale)
    return out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)


def assert_same(kernel, row, heads, scale=None):
    for found, expected in zip(results(kernel, row, heads, scale), results(masked, row, heads, scale), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_the_npu_kernel_equals_the_mask_and_its_gradients(case, heads):
    for row in rows(case):
        assert_same(npu.attend, row, heads)


def test_a_given_scale_is_used():
    assert_same(npu.attend, rows("ragged")[0], (4, 2), scale=0.3)


def test_more_parts_than_a_call_takes():
    row = layout([([0, 0], [[0]] * 1100)])
    assert [len(call.queries) for call in npu.calls(row)] == [1024, 76]
    assert_same(npu.attend, row, (2, 1))


def test_the_module_runs_on_it():
    row = rows("several groups")[0]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(row.size, 1, heads, 8, generator=generator) for heads in (4, 2, 2))
    found = SegmentAttention.backend("npu")(None)(q, k, v, None, packed_seq_params=params(row))
    expected = SegmentAttention.backend("reference")(None)(q, k, v, None, packed_seq_params=params(row))
    assert found.shape == (row.size, 1, 32)
    torch.testing.assert_close(found, expected)


def test_the_signature_is_binding(operator):
    q = torch.zeros(1, 1, 16)
    with pytest.raises(RuntimeError, match="actual_seq_q_len"):
        operator(q, q, q, 1, "TND", actual_seq_q_len=[1], actual_seq_kvlen=[1])
    with pytest.raises(RuntimeError, match="input_layout"):
        operator(q, q, q, 1)


@pytest.mark.parametrize("mode", [0, 2])
def test_another_sparse_mode_would_be_noticed(mode, monkeypatch):
    monkeypatch.setattr(npu, "RIGHT_DOWN_CAUSAL", mode)
    with pytest.raises(AssertionError):
        results(npu.attend, rows("ragged")[0], (4, 2))


@pytest.mark.slow
def test_the_fixture_is_what_the_wheel_ships(tmp_path):
    with torch_npu_wheel(tmp_path) as wheel:
        functions = wheel.read("torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml").decode()
        manual = wheel.read("torch_npu/_op_plugin_docs.py").decode()
    assert f"func: {published()}\n" in functions
    manual = manual[manual.index('"npu_fusion_attention"') :]
    for rule in (
        "sparse_mode为3时, 代表rightDownCausal模式的mask, 对应以右下顶点划分的下三角场景",
        "atten_mask为优化后的压缩下三角矩阵(2048*2048)",
        "比如真正的S长度列表为: 2 2 2 2 2, 则actual_seq_qlen传: 2 4 6 8 10",
        "varlen场景下长度最大支持1K",
    ):
        assert rule in manual
