"""The routers of a mixture of experts: routing replay (R3), and the number of tokens that each expert gets.

Routing replay computes each token with the experts that computed it in the rollout instance. The gate is still the
softmax of the trainer's logits over them, so that gradients flow into the router (Ma et al. 2025, "Stabilizing MoE RL
by aligning training and inference routers", arXiv 2510.11370).

Megatron's `RouterReplay` is not used. It has one target per router and a queue for the backward pass, and the caller
must say which of the two a forward pass is. Under 1F1B with recomputation the two alternate inside Megatron's schedule.
It also can't represent a token that no instance has routed. Here the routes are part of the layout, which travels with
the micro-batch, so each forward pass, including recomputation, finds its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from engine.model.layout import Layout
from engine.model.shape import Experts


@dataclass(frozen=True)
class ReplayedRoutes:
    """The experts of a router's tokens, replacing Megatron's RouterReplay."""

    experts: Tensor
    """[tokens, experts per token]; negative where the router chooses."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """[tokens, experts] scores → ([tokens, k] scores of the chosen experts, [tokens, k] their numbers)."""
        _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = torch.where(self.experts < 0, own, self.experts.long())
        return scores.gather(1, chosen), chosen


def install_routing(model: GPTModel, experts: Experts) -> None:
    """Make the routers of this rank's layers follow the routes of each layout, and count the tokens of each expert
    (no filler)."""
    for layer in model.decoder.layers:
        if layer.layer_number - 1 in experts.layers:
            position = experts.layers.index(layer.layer_number - 1)
            layer.register_forward_pre_hook(partial(_give_routes, position), with_kwargs=True)
            layer.mlp.router.register_forward_hook(_count)


def _give_routes(position: int, layer: Any, args: Any, kwargs: dict[str, Any]) -> None:  # noqa: ANN401
    """`position`: index of the layer among those with experts."""
    layout: Layout = kwargs["packed_seq_params"].layout
    routes = None if layout.routes is None else layout.routes[:, position]
    real = layout.real
    if layer.config.sequence_parallel:
        size = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
        routes = None if routes is None else routes.chunk(size)[rank]
        real = real.chunk(size)[rank]
    layer.mlp.router.router_replay = None if routes is None else ReplayedRoutes(routes)
    layer.mlp.router.real_tokens = real


def _count(router: TopKRouter, inputs: Any, found: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    if torch.is_grad_enabled():  # once per trained micro-batch: scoring, and a pass to be recomputed, run without grad
        tokens = (found[1].detach() & router.real_tokens[:, None]).sum(0)
        router.tokens_of_experts = getattr(router, "tokens_of_experts", 0) + tokens


def take_counts(model: GPTModel) -> dict[int, list[int]]:
    """Return, by layer, the tokens (no filler) that this rank's part of the model has sent to each expert in training
    since the last call. {} for a dense model."""
    found: dict[int, list[int]] = {}
    for layer in model.decoder.layers:
        router: Any = getattr(layer.mlp, "router", None)
        if hasattr(router, "tokens_of_experts"):
            found[layer.layer_number - 1] = router.tokens_of_experts.tolist()
            del router.tokens_of_experts
    return found
