"""Operators of torch_npu without an NPU: their published signatures with the documented semantics behind them on a
CPU.

They refuse what the documentation of torch_npu 2.10.0.post4 (_op_plugin_docs.py) does not allow, and take float64 too,
for exact comparisons. Statistics of a softmax are then float64, and else float32 as documented.
"""

from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F

SCHEMA = Path(__file__).parents[1] / "contract/npu_operators.schema"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COPIES = 8


def define():
    """Define the operators from the published signatures; returns the library that holds them."""
    library = torch.library.Library("npu", "DEF")
    kernels = {
        "npu_attention_update": attention_update,
        "npu_add_rms_norm": add_rms_norm,
        "npu_fusion_attention": fusion_attention,
        "npu_fusion_attention_grad": fusion_attention_grad,
        "npu_grouped_matmul": grouped_matmul,
        "npu_rms_norm": rms_norm,
        "npu_rms_norm_backward": rms_norm_backward,
        "npu_rotary_mul": rotary_mul,
        "npu_swiglu": swiglu,
    }
    for signature in published():
        library.define(signature)
        name = signature.partition("(")[0]
        library.impl(name, _by_name(name, kernels.pop(name)), "CompositeImplicitAutograd")
    assert not kernels
    return library


def published():
    """`name(arguments) -> returns` of each operator, as the wheel has it."""
    return [line.removeprefix("func: ") for line in SCHEMA.read_text().splitlines() if line.startswith("func: ")]


def _by_name(name, kernel):
    """The kernel with all arguments by name, with the signature's defaults."""

    arguments = getattr(torch.ops.npu, name).default._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments}

    def call(*given, **named):
        return kernel(**defaults | dict(zip(defaults, given, strict=False)) | named)

    return call


def fusion_attention(query, key, value, **options):
    """TND, with sparse_mode 3 or without a mask. The largest score and the sum of exponentials come as [T, N, 8]."""
    done = []
    for _, keys, scores in _sequences(query, key, value, **options):
        largest = scores.amax(-1, keepdim=True)
        total = (scores - largest).exp().sum(-1, keepdim=True)
        out = torch.einsum("hqk,khd->qhd", (scores - largest).exp() / total, _wide(value[keys], query))
        done.append((out.to(query.dtype), *(x.expand(-1, -1, COPIES).transpose(0, 1) for x in (largest, total))))
    return *(torch.cat(parts) for parts in zip(*done, strict=True)), query.new_zeros(0), 0, 0, 0


def fusion_attention_grad(query, key, value, dy, *, softmax_max, softmax_sum, attention_in, scale_value, **options):
    """From the *given* statistics and output: p = exp(score − max) / sum, ds = p · (dy·v − dy·attention_in)."""
    assert dy.shape == attention_in.shape == query.shape
    assert dy.dtype == attention_in.dtype == query.dtype
    for statistic in (softmax_max, softmax_sum):
        assert statistic.shape == (*query.shape[:2], COPIES)
        assert statistic.dtype is _statistics(query)
        assert statistic.is_contiguous()
        assert torch.equal(statistic, statistic[..., :1].expand_as(statistic))
    done = []
    for rows, keys, scores in _sequences(query, key, value, scale=scale_value, **options):
        largest, total = (x[rows, :, :1].transpose(0, 1) for x in (softmax_max, softmax_sum))
        shares = (scores - largest).exp() / total
        above, result, q, k, v = (
            _wide(x, query) for x in (dy[rows], attention_in[rows], query[rows], key[keys], value[keys])
        )
        along = torch.einsum("qhd,khd->hqk", above, v)
        to_scores = scale_value * shares * (along - (above * result).sum(-1).T[..., None])
        to_key, to_value = (
            torch.einsum("hqk,qhd->khd", *pair).unflatten(1, (key.shape[1], -1)).sum(2)
            for pair in ((to_scores, q), (shares, above))
        )
        done.append((torch.einsum("hqk,khd->qhd", to_scores, k), to_key, to_value))
    return *(torch.cat(parts).to(query.dtype) for parts in zip(*done, strict=True)), None, query.new_zeros(0)


def attention_update(lse, local_out, update_type):
    """The parts' results, each weighted with exp(its lse − the whole's), and the whole's lse."""
    assert update_type == 1
    assert len(lse) == len(local_out)
    for statistic, out in zip(lse, local_out, strict=True):
        assert out.dtype == local_out[0].dtype
        assert out.dtype in DTYPES
        assert statistic.dtype is _statistics(out)
        assert out.dim() == 2
        assert statistic.shape == lse[0].shape == out.shape[:1]
        assert out.is_contiguous()
        assert statistic.is_contiguous()
    whole = torch.stack(lse).logsumexp(0)
    parts = [(one - whole).exp()[:, None] * out for one, out in zip(lse, local_out, strict=True)]
    return sum(parts).to(local_out[0].dtype), whole


def _sequences(query, key, value, *, head_num, input_layout, scale, atten_mask, sparse_mode, **options):
    """(rows, keys, scores [N, L, K] with −∞ where hidden) of each sequence, after all arguments were checked."""
    rows = options["actual_seq_qlen"]
    keys = options["actual_seq_kvlen"]
    tokens, heads, _ = query.shape
    assert input_layout == options["softmax_layout"] == "TND"
    assert head_num == heads
    assert key.shape == value.shape
    assert heads % key.shape[1] == 0
    assert query.dtype == key.dtype == value.dtype
    assert query.dtype in DTYPES
    assert 1 <= len(rows) == len(keys) <= 1024
    assert (rows[-1], keys[-1]) == (tokens, key.shape[0])
    if atten_mask is not None:
        assert sparse_mode == 3
        assert atten_mask.dtype is torch.bool
        assert atten_mask.shape == (2048, 2048)
        assert torch.equal(atten_mask, _upper_triangle())
    for (a, b), (c, d) in zip(pairwise([0, *rows]), pairwise([0, *keys]), strict=True):
        assert a < b
        assert c < d
        scores = scale * torch.einsum("qhd,khd->hqk", _wide(query[a:b], query), _wide(key[c:d], query))
        if atten_mask is not None:
            assert b - a <= d - c, "a query that sees nothing is not allowed with variable lengths"
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + scores.shape[2] - scores.shape[1])
            scores = scores.masked_fill(hidden, float("-inf"))
        yield slice(a, b), slice(c, d), scores


def _wide(x, query):
    """[L, N, d] in the dtype of the statistics, with one head for each head of the query."""
    return x.to(_statistics(query)).repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _statistics(query):
    return torch.promote_types(query.dtype, torch.float32)


def grouped_matmul(x, weight, *, group_list, split_item, group_type, group_list_type, **others):
    """One tensor each of tokens, weights and results, in groups of rows by their ends."""
    assert not any(value for name, value in others.items() if name != "act_type")
    assert others["act_type"] == 0
    (rows,) = x
    (weights,) = weight
    assert split_item in (2, 3)
    assert group_type == 0
    assert group_list_type == 0
    assert rows.dtype == weights.dtype
    assert rows.dtype in DTYPES
    assert rows.dim() == 2
    assert rows.is_contiguous(), "the tokens may not be transposed"
    assert weights.is_contiguous() or weights.transpose(1, 2).is_contiguous()
    assert max(rows.shape[1], weights.shape[1], weights.shape[2]) < 65536
    assert group_list.dtype is torch.int64
    assert group_list.shape == weights.shape[:1]
    assert len(group_list) <= 1024
    ends = [0, *group_list.tolist()]
    assert ends == sorted(ends)
    assert ends[-1] == len(rows)
    return [torch.cat([rows[a:b] @ one for (a, b), one in zip(pairwise(ends), weights, strict=True)])]


def rms_norm(self, gamma, epsilon):
    """(self / rms · gamma, 1 / rms in float32)."""
    assert self.dtype == gamma.dtype
    assert self.dtype in DTYPES
    assert 2 <= self.dim() <= 8
    assert gamma.shape == self.shape[-1:]
    wide = self.to(_statistics(self))
    rstd = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * rstd * gamma).to(self.dtype), rstd


def add_rms_norm(x1, x2, gamma, epsilon):
    """(the norm, 1 / rms in float32, x1 + x2)."""
    assert x1.shape == x2.shape
    assert x1.dtype == x2.dtype
    total = x1 + x2
    return *rms_norm(total, gamma, epsilon), total


def rms_norm_backward(dy, self, gamma, rstd):
    """The gradients of self and gamma."""
    assert dy.shape == self.shape
    assert dy.dtype == self.dtype == gamma.dtype
    assert rstd.dtype is _statistics(self)
    assert rstd.shape == (*self.shape[:-1], 1)
    normal = self.to(rstd.dtype) * rstd
    scaled = dy.to(rstd.dtype) * gamma
    along = (scaled * normal).mean(-1, keepdim=True)
    to_gamma = (dy.to(rstd.dtype) * normal).flatten(0, -2).sum(0)
    return ((scaled - normal * along) * rstd).to(self.dtype), to_gamma.to(gamma.dtype)


def rotary_mul(self, r1, r2, rotary_mode, rotate):
    """r1 · self + r2 · (−self₂, self₁), for the layout SBND with r1 and r2 as S11D."""
    assert rotary_mode == "half"
    assert rotate is None
    assert self.dtype == r1.dtype == r2.dtype
    assert self.dtype in DTYPES
    length, batch, heads, width = self.shape
    assert r1.shape == r2.shape == (length, 1, 1, width)
    assert max(r1.abs().max(), r2.abs().max()) <= 1
    assert width < 896
    assert width % 2 == 0
    assert max(batch, heads) < 1000
    first, second = self.chunk(2, -1)
    return r1 * self + r2 * torch.cat([-second, first], dim=-1)


def swiglu(self, dim):
    """silu(A) · B of the halves A and B along `dim`."""
    assert self.dtype in DTYPES
    assert 1 <= self.dim() <= 8
    assert self.shape[dim] % 2 == 0
    gate, up = self.chunk(2, dim)
    return F.silu(gate) * up


@cache
def _upper_triangle():
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)
