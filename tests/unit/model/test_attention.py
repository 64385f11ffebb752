"""Every kernel against the plain mask, values and gradients; SegmentAttention over two context-parallel processes."""

import os

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import multiprocessing
from torch.distributed import TCPStore

from engine.model.attention import SegmentAttention, attention_params
from engine.model.kernels import cpu, cuda
from engine.model.kernels.reference import masked_attention
from support.attention_cases import CASES, HEADS, assert_near_in_bfloat16, assert_same, row_of, shards_of
from support.parallel.two_ranks import rank_environment


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kernel", [cpu.by_segment, cpu.attend], ids=["segment", "cpu"])
def test_a_cpu_kernel_equals_the_mask_and_its_gradients(kernel, case, heads):
    for row in shards_of(row_of(CASES[case])):
        assert_same(kernel, row, heads)


@pytest.mark.parametrize("short", [0, cpu.SHORT])
def test_the_cpu_kernel_in_bfloat16_with_and_without_fp32_scores(short, monkeypatch):
    monkeypatch.setattr(cpu, "SHORT", short)
    for row in shards_of(row_of(CASES["ragged"])):
        assert_near_in_bfloat16(cpu.attend, row, (4, 2))


def test_the_plan_computes_nothing_hidden_if_calls_are_free():
    (causal, behind) = row_of([(10, [4, 4, 4])]).once(cpu.plan, 0).batches
    assert causal.mask is None
    assert causal.queries.shape == (1, 14)  # the prompt with its first response
    assert behind.queries.shape == (2, 4)
    assert behind.mask.tolist() == [[True] * (11 + i) + [False] * (3 - i) for i in range(4)]


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """FlexAttention's plain implementation has a backward on CPU too; only a check of the arguments refuses it."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_cuda_kernel_uncompiled_equals_the_mask_and_its_gradients(case, flex_on_cpu):
    for row in shards_of(row_of(CASES[case])):
        assert_same(cuda.attend, row, (4, 2))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_cuda_kernel_in_bfloat16():
    row = row_of(CASES["ragged"])
    q, k, v = (torch.randn(row.size, heads, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 1))
    v = v.expand(-1, 2, -1)
    found = cuda.attend(*(x.bfloat16() for x in (q, k, v)), row)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), masked_attention(q, k, v, row), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("case", CASES)
def test_the_block_mask_is_that_of_the_whole_mask(case):
    for row in shards_of(row_of(CASES[case])):
        ours = row.once(cuda.block_mask)
        mask = row.mask
        theirs = flex.create_block_mask(lambda b, h, q, kv: mask[q, kv], None, None, *mask.shape, device="cpu")  # noqa: B023
        for name in ("kv", "full_kv", "q", "full_q"):
            counts = getattr(ours, f"{name}_num_blocks")
            numbers = getattr(ours, f"{name}_indices")
            assert torch.equal(counts, getattr(theirs, f"{name}_num_blocks"))
            for count, found, expected in zip(
                counts.flatten(), numbers.flatten(0, 2), getattr(theirs, f"{name}_indices").flatten(0, 2), strict=True
            ):
                assert torch.equal(found[:count], expected[:count])
        assert row.once(cuda.block_mask) is ours  # made once for all layers


def test_the_module_takes_megatrons_arguments():
    row = row_of(CASES["several groups"])
    q, k, v = (torch.randn(row.size, 1, heads, 8) for heads in (4, 2, 2))
    expected = masked_attention(*(x.squeeze(1) for x in (q, k, v)), row, 0.2).reshape(row.size, 1, 32)
    for name in ("cpu", "reference"):
        module = SegmentAttention.backend(name)(config=None, layer_number=1, attn_mask_type=None, softmax_scale=0.2)
        torch.testing.assert_close(module(q, k, v, None, packed_seq_params=attention_params(row)), expected)


PARALLEL = {
    "group of 1": [(5, [6])],
    "group of 2, one empty": [(4, [0, 9])],
    "group of 8, very different lengths": [(17, [1, 40, 3, 0, 90, 2, 2, 7])],
    "several groups": CASES["several groups"],
    "over several blocks": CASES["over several blocks"],
}


def inputs_of(row, heads):
    generator = torch.Generator().manual_seed(0)
    shapes = [(row.row_size, 1, heads[0], 16), *[(row.row_size, 1, heads[1], 16)] * 2, (row.row_size, 1, heads[0] * 16)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def on_a_rank(rank, port, folder):
    """One of two context-parallel ranks: outputs and gradients of its rows, by case; also with recomputation."""
    from megatron.core.tensor_parallel.random import checkpoint

    from engine.platform import get_platform, parallel_session

    torch.set_num_threads(1)
    os.environ |= rank_environment(rank, 2, port, local=rank)
    found = {}
    with parallel_session(get_platform("cpu"), seed=0, context=2, timeout_s=60):
        module = SegmentAttention.backend("cpu")(None)
        for name, groups in PARALLEL.items():
            row = row_of(groups).aligned(4).shard(rank, 2)
            *inputs, weight = (x[row.rows].requires_grad_() for x in inputs_of(row, (4, 2)))

            def attend(*inputs, row=row):
                return module(*inputs, None, packed_seq_params=attention_params(row))

            for out in (attend(*inputs), checkpoint(attend, False, *inputs)):
                for x in inputs:
                    x.grad = None
                (out * weight).sum().backward()
                found.setdefault(name, []).append([row.rows, out.detach(), *(x.grad for x in inputs)])
        with pytest.raises(ValueError, match="spread over 1 ranks.* has 2"):
            module(*inputs, None, packed_seq_params=attention_params(row_of(CASES["ragged"])))
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_context_parallel_attention_equals_a_single_process(tmp_path):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.spawn(on_a_rank, (store.port, tmp_path), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, groups in PARALLEL.items():
        row = row_of(groups).aligned(4)
        *inputs, weight = (x.requires_grad_() for x in inputs_of(row, (4, 2)))
        out = masked_attention(*(x.squeeze(1) for x in inputs), row).reshape(row.size, 1, -1)
        whole = [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]
        for found in (run for rank in ranks for run in rank[name]):
            rows, *tensors = found
            for ours, expected in zip(tensors, whole, strict=True):
                torch.testing.assert_close(ours, expected[rows], rtol=1e-9, atol=1e-11)
