"""A plugin of vLLM for tests, found by its entry point where PYTHONPATH has this folder: mixtures of experts on a CPU.

vLLM packs their weights for its kernel when it loads them, but not when it reloads them. The kernel then reads plain
weights as packed ones.
"""

PACKS_ONCE = "0.32."
"""Prefix of the versions of the vLLM releases with this behaviour."""


def pack_at_every_load():
    """Make vLLM pack the experts' weights at every load. If another release needs the fix, the comparison after a
    weight sync rejects its mixtures of experts."""
    from vllm import __version__

    if not __version__.startswith(PACKS_ONCE):
        return
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    set_up = UnquantizedFusedMoEMethod._setup_kernel

    def _setup_kernel(self, layer, w13, w2):
        again = self.moe_kernel is not None
        set_up(self, layer, w13, w2)
        if again:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = _setup_kernel
