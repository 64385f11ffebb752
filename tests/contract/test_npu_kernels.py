"""The NPU kernels without an NPU: torch_npu's published signatures, and the documented semantics on a CPU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel

from engine import platform
from engine.model import build, experts, npu_operators
from engine.model.attention import SegmentAttention, attention_params
from engine.model.kernels import npu
from engine.model.norm import RMSNorm, add_in_norm, add_to_made
from engine.model.rotary import RotaryAtPositions, rotary_frequencies, rotate_positions
from engine.model.swiglu import SwiGLU
from engine.tools.acceptance import comparisons
from support.attention_cases import CASES, HEADS, assert_near_in_bfloat16, assert_same, row_of, shards_of
from support.npu_operators import define, published
from support.torch_npu_wheel import torch_npu_wheel

HOST = torch.device("cpu")
RULES = {
    "npu_add_rms_norm_cast": (  # the manual has no npu_add_rms_norm
        "add_rms_norm和cast的融合算子，对add_rms_norm计算后的输出做指定类型的cast操作",
        "x：Device侧的Tensor类型，归一化的数据和",
        "y1, y2, rstd, x = torch_npu.npu_add_rms_norm_cast(input_x1, input_x2, input_gamma)",
    ),
    "npu_attention_update": (
        "O = ΣOi * exp(lsei - lsem)",
        "每个Tensor形状为 (batch * seqLen * headNum)，各sp域计算的lse。数据类型支持 FLOAT，",
        "(batch * seqLen * headNum, head_dim)，各sp域计算的output。数据类型支持 FLOAT，FLOAT16，BFLOAT16，",
        "update_type=1时有效",
    ),
    "npu_fusion_attention": (
        "sparse_mode为3时, 代表rightDownCausal模式的mask, 对应以右下顶点划分的下三角场景",
        "atten_mask为优化后的压缩下三角矩阵(2048*2048)",
        "如果atten_mask未传入则不做mask操作",
        "比如真正的S长度列表为: 2 2 2 2 2, 则actual_seq_qlen传: 2 4 6 8 10",
        "varlen场景下长度最大支持1K",
        "传入TND时，softmax的输出排布为TND排布",
    ),
    "npu_grouped_matmul": (
        "0: 单单单, x、weight与y均为单张量",
        "weight中tensor需为3维, x、y中tensor需为2维",
        "当group_list_type为0时, 最后一个值与x中tensor的第一维相等",
        "group_list第1维最大支持1024",
        "支持weight转置. x不支持转置",
        "当group_list_type为0时, group_list必须为非负单调非递减数列",
        "内轴限制InnerLimit为65536",
        "2/3: 输出为单个张量",
    ),
    "npu_rms_norm": ("gamma：Tensor类型，数据类型需要和self保持一致",),
    "npu_rotary_mul": ("output = r1 * input + r2 * x_new", "input为SBND: S11D"),
    "npu_swiglu": ("swish(A) * B = A * sigmoid(A) * B",),
}
"""What the manual says of an operator, and the operators of the tests do."""


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


def test_the_module_runs_on_it():
    row = row_of(CASES["several groups"])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(row.size, 1, heads, 8, generator=generator) for heads in (4, 2, 2))
    found = SegmentAttention.backend("npu")(None)(q, k, v, None, packed_seq_params=attention_params(row))
    expected = SegmentAttention.backend("reference")(None)(q, k, v, None, packed_seq_params=attention_params(row))
    assert found.shape == (row.size, 1, 32)
    torch.testing.assert_close(found, expected)


def differences(ours, plain, *inputs):
    """Largest differences of the results and of the gradients of all inputs, which are made from their shapes."""
    generator = torch.Generator().manual_seed(0)
    found = []
    out = ours(*inputs)
    weight = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    for operation in (ours, plain):
        result = operation(*inputs)
        found.append([result.detach(), *torch.autograd.grad((result * weight).sum(), inputs)])
    assert all(a.dtype == b.dtype for a, b in zip(*found, strict=True))
    return [float((a - b).abs().max()) for a, b in zip(*found, strict=True)]


def drawn(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=dtype).requires_grad_()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("shape", [(7, 1, 128), (5, 1, 4, 16)])
def test_the_norm_is_the_plain_one(dtype, bound, shape, on_npu):
    norm = RMSNorm(SimpleNamespace(params_dtype=dtype, sequence_parallel=False), shape[-1], eps=1e-5)
    x = drawn(*shape, dtype=dtype)
    weight = drawn(shape[-1], dtype=dtype)

    def ours(x, weight):
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    assert max(differences(ours, lambda x, weight: F.rms_norm(x, shape[-1:], weight, 1e-5), x, weight)) < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_the_norm_with_its_sum_is_the_plain_one(dtype, bound, on_npu):
    norm = RMSNorm(SimpleNamespace(params_dtype=dtype, sequence_parallel=False), 128, eps=1e-5)
    inputs = [drawn(*shape, dtype=dtype) for shape in ((7, 1, 128), (7, 1, 128), (128,))]

    def ours(x, added, weight):
        stream = add_in_norm(True, False)((added.sin(), None), x, 0.0)
        return add_to_made(True, False)(
            (torch.func.functional_call(norm, {"weight": weight}, (stream,)), None), stream, 0.0
        )

    def plain(x, added, weight):
        total = x + added.sin()
        return F.rms_norm(total, (128,), weight, 1e-5) + total

    assert max(differences(ours, plain, *inputs)) < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_swiglu_is_the_plain_one(dtype, bound, on_npu):
    def plain(joint):
        gate, up = joint.chunk(2, -1)
        return F.silu(gate) * up

    assert max(differences(SwiGLU(None), plain, drawn(5, 3, 14, dtype=dtype))) < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_the_rotation_is_the_plain_one(dtype, bound, on_npu):
    shape = SimpleNamespace(rope_theta=10000.0, head_dim=16, rope_scaling=None)
    positions = torch.tensor([0, 1, 2, 2, 90])
    angles = torch.outer(positions.float(), rotary_frequencies(shape)).repeat(1, 2)[:, None, None, :]
    tables = RotaryAtPositions(shape)(positions)

    def plain(t):
        first, second = t.chunk(2, -1)
        return t * angles.cos().to(dtype) + torch.cat([-second, first], dim=-1) * angles.sin().to(dtype)

    assert max(differences(lambda t: rotate_positions(t, tables), plain, drawn(5, 1, 4, 16, dtype=dtype))) < bound


def plain_product(sizes):
    def plain(x, *weights):
        return torch.cat([part @ weight.T for part, weight in zip(x.split(sizes), weights, strict=True)])

    return plain


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
@pytest.mark.parametrize("sizes", [[3, 0, 4, 1], [0, 0, 8, 0], [2, 2, 2, 2]])
def test_the_product_of_all_experts_is_that_of_each(dtype, bound, sizes, on_npu):
    x = drawn(8, 6, dtype=dtype)
    weights = [torch.randn(10, 6, dtype=dtype).requires_grad_() for _ in sizes]

    def ours(x, *weights):
        return experts.grouped_product(experts.product_for(x, 10, 6), sizes, x, torch.stack(weights))

    assert max(differences(ours, plain_product(sizes), x, *weights)) < bound


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
        manual = wheel.read("torch_npu/_op_plugin_docs.py").decode()
        binary = wheel.read("torch_npu/lib/libtorch_npu.so")
    for signature in published():
        assert f"func: {signature}\n" in functions
    for derivative in ("NpuRmsNormBackward0", "NpuSwigluBackward0"):
        assert derivative.encode() in binary
    for operator, rules in RULES.items():
        text = manual[manual.index(f'"{operator}"') :]
        for rule in rules:
            assert rule in text
