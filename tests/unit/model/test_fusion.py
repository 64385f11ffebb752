"""What is compiled on CUDA, compiled by torch for the CPU: equal to the plain operations, values and gradients."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from engine.model import fusion, logprobs, norm, rotary, swiglu
from engine.model.kernels import merged
from support.attention_cases import results as attention_results
from support.attention_cases import row_of
from support.plain_kernel import Plain


@pytest.fixture
def compiled(monkeypatch):
    """Tensors of the host are taken for ones on CUDA. The names of the functions that were compiled."""
    called = []

    def noted(function):
        called.append(function.__name__)
        return fusion.compile_once(function)

    for module in (logprobs, merged, norm, rotary, swiglu):
        monkeypatch.setattr(module, "can_fuse", lambda x: True)
        monkeypatch.setattr(module, "compile_once", noted)
    return called


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def results(operation, x):
    x = x.clone().requires_grad_()
    out = operation(x)
    return out.detach(), *torch.autograd.grad(out, x, drawn(*out.shape))


def attention(*rows):
    """Attention of a joint tensor [T, 4 + 2 + 2 heads, d], by the one of the rows that has its length."""
    by_length = {row.size: row for row in map(row_of, rows)}

    def operation(joint):
        q, k, v = joint.split([4, 2, 2], dim=1)
        return merged.attend(q, k, v, by_length[len(joint)], kernel=Plain)

    return operation


NORM = norm.RMSNorm(SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False), 48)


def sum_and_norm(x):
    """The end of a layer after attention, whose output, residual stream and norm's weight are made of `x`."""
    stream = norm.add_in_norm(True, False)((x.sin(), None), x, 0.0)
    normed = torch.func.functional_call(NORM, {"weight": x[0, 0]}, (stream,))
    return norm.add_to_made(True, False)((normed.cos(), None), stream, 0.0)


def scores(x):
    """Log-probabilities and entropies in three chunks; in the first shape with padding."""
    weight = drawn(50, x.shape[1])
    found = logprobs.token_logprobs(x, weight, torch.arange(len(x)), 0.7, vocabulary=50 - len(x) % 2, chunk=4)
    return torch.stack(found)


CASES = {
    "log-probabilities": (scores, [(9, 24), (12, 24)], ["slice_sums"] * 3 + ["overwrite_by_gradient"] * 3),
    "sum and norm": (sum_and_norm, [(5, 1, 48), (9, 1, 48)], ["sum_and_norm", "sum_and_norm_gradient"]),
    "one prompt": (attention([(5, [3, 7, 1])], [(9, [4, 7, 5])]), [(16, 8, 16), (25, 8, 16)], ["merge_part"]),
    "two prompts": (
        attention([(3, [2, 5]), (2, [1, 3])], [(5, [4, 2, 3]), (2, [6, 7])]),
        [(16, 8, 16), (29, 8, 16)],
        ["merge_part"],
    ),
    "swiglu": (swiglu.SwiGLU(None), [(5, 1, 48), (9, 1, 48)], ["swiglu_product", "swiglu_gradient"]),
    "rotation": (
        lambda t: rotary.rotate_positions(t, TABLES[:, : len(t)]),
        [(5, 1, 4, 16), (9, 1, 4, 16)],
        ["rotate_halves", "rotate_halves"],
    ),
}
ANGLES = torch.outer(torch.arange(9.0), torch.rand(8, generator=torch.Generator().manual_seed(0)))[:, None, None, :]
TABLES = torch.stack(
    [
        torch.cat([ANGLES.cos()] * 2, -1),
        torch.cat([-ANGLES.sin(), ANGLES.sin()], -1),
        torch.cat([ANGLES.sin(), -ANGLES.sin()], -1),
    ]
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_the_compiled_kernel_is_the_plain_operation(case, request):
    operation, shapes, names = CASES[case]
    expected = [results(operation, drawn(*shape)) for shape in shapes]
    called = request.getfixturevalue("compiled")
    for shape, values in zip(shapes, expected, strict=True):
        for found, value in zip(results(operation, drawn(*shape)), values, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
    assert called == names * len(shapes)


@pytest.fixture(scope="module")
def graphs():
    """Tensors of the host are taken for ones on CUDA, and compiled as far as to graphs, which are counted."""
    graphs = CompileCounterWithBackend("aot_eager")
    fusion.compile_once.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=graphs))
        yield graphs
    fusion.compile_once.cache_clear()


GROUPS = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(0, 30), max_size=4)), min_size=1, max_size=3)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    groups=GROUPS,
    shards=st.integers(1, 2),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_parts_of_any_shape_are_merged_by_the_same_graphs(groups, shards, heads, dtype, graphs):
    row = row_of(groups).aligned(2 * shards).shard(0, shards)
    prompt = row.once(merged.plan).prompt
    assume(prompt is None or sum(prompt.sequences.queries) > 1)  # for sizes of one torch makes a graph of its own
    attend = partial(merged.attend, kernel=Plain)
    expected = attention_results(attend, row, heads, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merged, "can_fuse", lambda x: True)
        found = attention_results(attend, row, heads, dtype=dtype)
    assert all(map(torch.equal, found, expected))  # these graphs are of torch's own operations
    assert graphs.frame_count <= 4  # for each dtype, with tokens that follow one another and with others


class OnCuda:
    """What a tensor says on a GPU."""

    is_cuda = True


def test_without_triton_a_warning_says_what_is_not_fused(monkeypatch):
    fusion._has_compiler.cache_clear()
    monkeypatch.setattr(fusion.importlib.util, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="triton is not installed: SwiGLU, the rotation, the merge of attention"):
        assert not fusion.can_fuse(OnCuda())
    monkeypatch.undo()
    fusion._has_compiler.cache_clear()


def test_a_cpu_computes_single_operations(monkeypatch):
    monkeypatch.setattr(fusion, "_has_compiler", lambda: True)
    assert fusion.can_fuse(OnCuda())
    assert not fusion.can_fuse(torch.zeros(1))
