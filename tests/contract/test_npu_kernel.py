"""The NPU kernel without an NPU: torch_npu's published signature with the documented semantics behind it, on a CPU."""

import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine.model.attention import SegmentAttention, params
from engine.model.kernels import npu
from engine.model.kernels.reference import masked
from engine.model.layout import layout

SCHEMA = Path(__file__).with_name("npu_fusion_attention.schema")
CASES = {
    "ragged": [(5, [3, 7, 1])],
    "empty and equal": [(4, [6, 0, 6, 2])],
    "several groups": [(3, [2, 2]), (1, [5]), (7, [1, 4])],
    "one token": [(1, [1])],
    "only empty": [(3, [0, 0])],
    "longer than a block": [(70, [90, 1, 33])],
}


def published():
    """`name(arguments) -> returns` as the wheel has it."""
    (line,) = (line for line in SCHEMA.read_text().splitlines() if line.startswith("func: "))
    return line.removeprefix("func: ")


def fusion_attention(query, key, value, head_num, input_layout, **options):
    """What torch_npu 2.13.0 documents (_op_plugin_docs.py) of TND with sparse_mode 3;
    refuses what it does not allow."""
    queries = options["actual_seq_qlen"]
    keys = options["actual_seq_kvlen"]
    tokens, heads, width = query.shape
    hidden = options["atten_mask"]
    assert input_layout == "TND"
    assert options["sparse_mode"] == 3
    assert hidden.dtype is torch.bool
    assert torch.equal(hidden, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    assert head_num == heads
    assert key.shape == value.shape
    assert heads % key.shape[1] == 0
    assert query.dtype == key.dtype == value.dtype
    assert 1 <= len(queries) == len(keys) <= 1024
    assert (queries[-1], keys[-1]) == (tokens, key.shape[0])
    out = [
        _right_down_causal(query[a:b], key[c:d], value[c:d], options["scale"])
        for (a, b), (c, d) in zip(pairwise([0, *queries]), pairwise([0, *keys]), strict=True)
    ]
    softmax = query.new_zeros(heads, tokens, 8, dtype=torch.float32)
    return torch.cat(out), softmax, softmax, query.new_zeros(0), 0, 0, 0


def _right_down_causal(query, key, value, scale):
    """Softmax(mask(scale · q kᵀ)) v; the last query sees all keys, each one before it one key less."""
    assert 1 <= query.shape[0] <= key.shape[0], "a query that sees nothing is not allowed with variable lengths"
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = scale * torch.einsum("qhd,khd->hqk", query, key)
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + key.shape[0] - query.shape[0])
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)


@pytest.fixture(scope="module", autouse=True)
def operator():
    """`torch.ops.npu.npu_fusion_attention`, defined from the published signature."""
    library = torch.library.Library("npu", "DEF")
    library.define(published())
    library.impl("npu_fusion_attention", _call, "CompositeImplicitAutograd")
    yield torch.ops.npu.npu_fusion_attention
    library._destroy()


def _call(query, key, value, head_num, input_layout, *rest, **options):
    names = [argument.name for argument in torch.ops.npu.npu_fusion_attention.default._schema.arguments][5:]
    given = dict(zip(names, rest, strict=False)) | options
    defaults = {"scale": 1.0, "sparse_mode": 0, "atten_mask": None, "actual_seq_qlen": None, "actual_seq_kvlen": None}
    return fusion_attention(
        query=query, key=key, value=value, head_num=head_num, input_layout=input_layout, **(defaults | given)
    )


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
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "torch_npu==2.10.0.post4",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version=3.11",
        "--platform=manylinux_2_28_x86_64",
        f"--dest={tmp_path}",
    ]
    done = subprocess.run(download, capture_output=True, text=True, timeout=200)
    if done.returncode:
        pytest.skip(f"torch_npu can't be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(next(tmp_path.glob("torch_npu-*.whl"))) as wheel:
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
