"""Attention heads of any size on a CPU: vLLM's CPU kernels support some sizes (32, 64, 80 …) and end the engine for
others."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import pad


def support_every_size() -> None:
    """Make vLLM's attention layers pad heads of an unsupported size with zeros to the next supported size.

    The results stay the same: zeros add nothing to q·k, and v's zeros become columns that are cut off. The cache grows
    by the same factor. Does nothing if vLLM does not compute on a CPU.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    widen_heads(Attention, CPUAttentionBackend.get_supported_head_sizes())


def widen_heads(attention: Any, sizes: list[int]) -> None:  # noqa: ANN401
    """Change the class of attention layers (vLLM's, or one with the same interface) to use only these head sizes."""
    build = attention.__init__
    compute = attention.forward

    def __init__(self: Any, num_heads: int, head_size: int, *others: Any, **named: Any) -> None:  # noqa: ANN401, N807
        known = min((size for size in sizes if size >= head_size), default=head_size)
        build(self, num_heads, head_size if named.get("head_size_v") else known, *others, **named)
        self.metronome_head_size = head_size

    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> Tensor:  # noqa: ANN401
        """query [tokens, heads * size], key and value [tokens, key-value heads * size] → [tokens, heads * size]."""
        size = self.metronome_head_size
        wide = self.head_size
        if size == wide:
            return compute(self, query, key, value, *others, **named)
        rows = [pad(rows.view(len(rows), -1, size), (0, wide - size)).flatten(1) for rows in (query, key, value)]
        return compute(self, *rows).view(len(query), -1, wide)[..., :size].flatten(1)

    attention.__init__ = __init__
    attention.forward = forward
