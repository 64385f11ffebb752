"""`torch.ops.npu.npu_fusion_attention` without an NPU: torch_npu's published signature with the documented semantics
behind it, on a CPU."""

from functools import cache
from itertools import pairwise
from pathlib import Path

import torch

SCHEMA = Path(__file__).parents[1] / "contract/npu_fusion_attention.schema"


def define():
    """Define the operator from the published signature; returns the library that holds it."""
    library = torch.library.Library("npu", "DEF")
    library.define(published())
    library.impl("npu_fusion_attention", _call, "CompositeImplicitAutograd")
    return library


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
    assert hidden.shape == (2048, 2048)
    assert torch.equal(hidden, _upper_triangle())
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


def _call(query, key, value, head_num, input_layout, *rest, **options):
    names = [argument.name for argument in torch.ops.npu.npu_fusion_attention.default._schema.arguments][5:]
    given = dict(zip(names, rest, strict=False)) | options
    defaults = {"scale": 1.0, "sparse_mode": 0, "atten_mask": None, "actual_seq_qlen": None, "actual_seq_kvlen": None}
    return fusion_attention(
        query=query, key=key, value=value, head_num=head_num, input_layout=input_layout, **(defaults | given)
    )


@cache
def _upper_triangle():
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)
