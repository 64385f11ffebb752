"""The prompt part and the own part, merged, against the plain mask: values and gradients, by the plain backend and by
torch's FlashAttention with a CPU behind its operators."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.kernels import cuda, merged
from engine.model.kernels.merged import Sequences
from support.attention_cases import CASES, HEADS, assert_near_in_bfloat16, assert_same, results, row_of, shards_of
from support.plain_kernel import Plain

plain = partial(merged.attend, kernel=Plain)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", HEADS)
def test_the_parts_together_equal_the_mask_and_its_gradients(case, heads):
    for row in shards_of(row_of(CASES[case])):
        assert_same(plain, row, heads)


GROUPS = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), max_size=4)), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(groups=GROUPS, size=st.integers(1, 3), data=st.data())
def test_any_row_and_any_shard_of_it_equal_the_mask(groups, size, data):
    row = row_of(groups).aligned(2 * size)
    assert_same(plain, row.shard(data.draw(st.integers(0, size - 1)), size), (2, 1))


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_stays_near(case):
    for row in shards_of(row_of(CASES[case])):
        assert_near_in_bfloat16(plain, row, (4, 2))


def test_one_group_is_computed_where_it_lies():
    own, prompt = vars(row_of([(5, [3, 7, 1])]).once(merged.plan)).values()
    assert (own.queries, own.keys) == (slice(0, 16), slice(0, 16))
    assert (own.sequences.queries, own.sequences.keys) == ((8, 7, 1), (8, 7, 1))
    assert (prompt.queries, prompt.keys) == (slice(8, 16), slice(0, 5))  # no query of the prompt or its first response
    assert (prompt.sequences.queries, prompt.sequences.keys) == ((8,), (5,))


def test_of_several_groups_each_prompt_is_gathered_once():
    row = row_of([(3, [2, 2, 2]), (1, [5]), (7, [1, 4, 1])])
    own, prompt = vars(row.once(merged.plan)).values()
    assert own.keys == slice(0, row.size)
    assert prompt.keys.tolist() == [0, 1, 2, *range(15, 22)]
    assert prompt.queries.tolist() == [5, 6, 7, 8, *range(23, 28)]
    assert (prompt.sequences.queries, prompt.sequences.keys) == ((4, 5), (3, 7))


def test_unmerged_values_in_the_backward_pass_would_be_noticed():
    class Unmerged(Plain):
        def backward(self, grad, q, k, v, out, lse, sequences):
            return super().backward(grad, q, k, v, *self.forward(q, k, v, sequences), sequences)

    with pytest.raises(AssertionError):
        assert_same(partial(merged.attend, kernel=Unmerged), row_of(CASES["ragged"]), (4, 2))


@pytest.fixture(scope="module")
def flash_on_cpu():
    """torch's operators of FlashAttention with the plain backend behind them, as torch.nn.attention.varlen describes
    them: offsets are int32 with a leading 0, and lse is [heads, T]."""

    def sequences(q, k, options):
        offsets = options["cum_seq_q"], options["cum_seq_k"]
        lengths = [tuple(x.diff().tolist()) for x in offsets]
        for x, offset, most, size in zip((q, k), offsets, (options["max_q"], options["max_k"]), lengths, strict=True):
            assert offset.dtype is torch.int32
            assert (offset[0], offset[-1], most) == (0, len(x), max(size))
        assert options["dropout_p"] == 0.0
        return Sequences(*lengths, causal=options["is_causal"], device=q.device)

    def by_name(name, given):
        arguments = getattr(torch.ops.aten, name).default._schema.arguments
        return dict(zip((argument.name for argument in arguments), given, strict=False))

    def forward(*given, scale, **defaults):
        q, k, v, *_ = given
        options = by_name("_flash_attention_forward", given)
        assert not options["return_debug_mask"]
        out, lse = Plain(scale).forward(q, k, v, sequences(q, k, options))
        return out, lse.T.contiguous(), *[torch.empty(0)] * 3

    def backward(*given, scale, **defaults):
        grad, q, k, v, out, lse, *_ = given
        assert lse.shape == (q.shape[1], q.shape[0])
        assert lse.is_contiguous()
        options = by_name("_flash_attention_backward", given)
        tensors = (grad, q, k, v, out, lse.T)
        return Plain(scale).backward(*tensors, sequences(q, k, options))

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield partial(merged.attend, kernel=cuda.Flash)
    library._destroy()


@pytest.mark.parametrize("case", CASES)
def test_the_calls_of_flash_attention_equal_the_mask_and_its_gradients(case, flash_on_cpu):
    for row in shards_of(row_of(CASES[case])):
        assert_same(flash_on_cpu, row, (4, 2))


def test_flash_attention_has_these_shapes():
    """By torch's own kernels for tensors without values."""
    q, k, v = (torch.empty(16, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    called = Sequences((9, 7), (9, 7), causal=True, device=torch.device("cpu"))
    vars(called).update(query_offsets=called.query_offsets.to("meta"), key_offsets=called.key_offsets.to("meta"))
    out, lse = cuda.Flash(0.1).forward(q, k, v, called)
    assert (out.shape, lse.shape) == (q.shape, (16, 4))
    inputs = (out, q, k, v, out, lse)
    grads = cuda.Flash(0.1).backward(*inputs, called)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    ("dtype", "width", "capability", "taken"),
    [
        (torch.bfloat16, 64, (8, 0), True),
        (torch.float16, 256, (9, 0), True),
        (torch.float32, 64, (9, 0), False),
        (torch.bfloat16, 264, (9, 0), False),
        (torch.bfloat16, 12, (9, 0), False),
        (torch.bfloat16, 64, (7, 5), False),
    ],
)
def test_flash_attention_is_called_for_what_it_takes(dtype, width, capability, taken, monkeypatch):
    class OnGpu:
        is_cuda = True
        device = "cuda"
        shape = (1, 1, width)

    OnGpu.dtype = dtype
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert cuda.flash_takes(OnGpu) is taken
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.0")
        assert not cuda.flash_takes(OnGpu)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert not cuda.flash_takes(OnGpu)


def test_results_are_finite_for_far_scores():
    """The merged log-sum-exp is exact where one part's scores are far above the other's."""
    row = row_of(CASES["ragged"])
    for scale in (1e-4, 300.0):
        assert all(torch.isfinite(x).all() for x in results(plain, row, (4, 2), scale))
        assert_same(plain, row, (4, 2), scale=scale)
