"""torch_npu's operators without torch_npu and without results: what shapes they return, also for gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FP32 = torch.float32


def define_operators() -> torch.library.Library:
    """torch_npu's operators by their published signatures, with shapes for results. Those of which torch_npu knows the
    gradient get one, in one kernel each."""
    library = torch.library.Library("npu", "DEF")
    signatures = (Path(__file__).parents[1] / "tests/contract/npu_operators.schema").read_text().splitlines()
    for line in signatures:
        if line.startswith("func: "):
            library.define(line.removeprefix("func: "))
    library.define("npu_swiglu_backward(Tensor grad, Tensor self) -> Tensor")
    shapes: dict[str, Callable[..., Any]] = {
        "npu_add_rms_norm": lambda x, added, gamma, epsilon=1e-6: (
            torch.empty_like(x),
            x.new_empty((*x.shape[:-1], 1), dtype=FP32),
            torch.empty_like(x),
        ),
        "npu_attention_update": lambda lse, outs, kind: (torch.empty_like(outs[0]), torch.empty_like(lse[0])),
        "npu_fusion_attention": _attention,
        "npu_fusion_attention_grad": _attention_grad,
        "npu_grouped_matmul": lambda x, weight, **rest: [x[0].new_empty((len(x[0]), weight[0].shape[-1]))],
        "npu_rms_norm": lambda x, gamma, epsilon=1e-6: (
            torch.empty_like(x),
            x.new_empty((*x.shape[:-1], 1), dtype=FP32),
        ),
        "npu_rms_norm_backward": lambda grad, x, gamma, rstd: (torch.empty_like(x), torch.empty_like(gamma)),
        "npu_rotary_mul": lambda x, cos, sin, *rest: torch.empty_like(x),
        "npu_swiglu": lambda x, dim=-1: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
        "npu_swiglu_backward": lambda grad, x: torch.empty_like(x),
    }
    for name, shape in shapes.items():
        torch.library.register_fake(f"npu::{name}", shape, lib=library)
    torch.library.register_autograd(
        "npu::npu_rms_norm",
        lambda ctx, grad, _: (*torch.ops.npu.npu_rms_norm_backward(grad, *ctx.saved_tensors), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2], output[1]),
        lib=library,
    )
    torch.library.register_autograd(
        "npu::npu_swiglu",
        lambda ctx, grad: (torch.ops.npu.npu_swiglu_backward(grad, *ctx.saved_tensors), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
        lib=library,
    )
    torch.library.register_autograd(
        "npu::npu_fusion_attention",
        _attention_backward,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:3], *output[:3]),
        lib=library,
    )
    return library


def _attention(query: Tensor, *rest: Any, **options: Any) -> Any:  # noqa: ANN401
    statistics = [query.new_empty((*query.shape[:2], 8), dtype=FP32) for _ in range(2)]
    return torch.empty_like(query), *statistics, query.new_empty(0), 0, 0, 0


def _attention_backward(ctx: Any, grad: Tensor, *rest: Any) -> Any:  # noqa: ANN401
    query, key, value, out, largest, total = ctx.saved_tensors
    found = torch.ops.npu.npu_fusion_attention_grad(
        query=query,
        key=key,
        value=value,
        dy=grad,
        head_num=query.shape[1],
        input_layout="TND",
        softmax_max=largest,
        softmax_sum=total,
        attention_in=out,
    )
    return *found[:3], *[None] * 21


def _attention_grad(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:  # noqa: ANN401
    return *map(torch.empty_like, (query, key, value)), query.new_empty(0), query.new_empty(0)
