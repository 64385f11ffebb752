"""A fix for mixtures of experts on a CPU: vLLM packs their weights for its kernel when it loads them, but not when it
reloads them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

PACKS_ONCE = "0.32."
"""Prefix of the versions of the vLLM releases with this behaviour."""


def pack_at_every_load() -> None:
    """Make vLLM pack the experts' weights at every load. Without this, the kernel reads plain weights as packed ones.

    Does nothing if vLLM does not compute on a CPU, or in releases that were not examined. If another release needs the
    fix, the comparison after a weight sync rejects its mixtures of experts.
    """
    from vllm import __version__
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and __version__.startswith(PACKS_ONCE):
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

        repack_experts(UnquantizedFusedMoEMethod)


def repack_experts(method: Any) -> None:  # noqa: ANN401
    """Change the class that prepares a layer's experts (vLLM's, or one with the same interface) to pack in later calls
    as well."""
    set_up = method._setup_kernel

    def _setup_kernel(self: Any, layer: nn.Module, w13: Tensor, w2: Tensor) -> None:  # noqa: ANN401
        again = self.moe_kernel is not None
        set_up(self, layer, w13, w2)
        if again:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method._setup_kernel = _setup_kernel
