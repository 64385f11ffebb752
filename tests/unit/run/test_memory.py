"""The dry run's memory against what the trainer really allocates:
parameters, gradients, optimizer states, activations."""

import pytest
import torch

from engine import platform
from engine.config.training import Parallel
from engine.model.shape import ModelShape
from engine.run.memory import _states, frozen_copies
from engine.run.sizes import layer_elements, rank_parameters
from support.runs import config_of

pytestmark = pytest.mark.usefixtures("megatron")


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def optimizer_tensors(policy):
    """Moments and master weights, as the checkpoint finds them."""
    masters = [group["params"] for group in policy.optimizer.optimizer.param_groups]
    own = {parameter.data_ptr() for parameter in policy.models.policy.parameters()}
    moments = [
        value
        for state in policy.optimizer.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.numel() > 1
    ]
    return [*moments, *(p for group in masters for p in group if p.data_ptr() not in own)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_what_the_trainer_allocates(settings, dtype):
    from engine.trainer.policy import Policy

    config = config_of(
        settings | {"train.dtype": dtype, "train.ratio_gap_limit": 0, "algorithm.gradient_control": "measure"}
    )
    policy = Policy(config, platform.get("cpu"))
    policy.start_step()
    policy.reduce(1)
    policy.step_optimizer()  # Adam makes its moments at the first step
    terms = {term.name: term.bytes for term in _states(rank_parameters(policy.models.shape, Parallel(), 0), config)}
    buffers = policy.ddp.buffers + policy.ddp.expert_parallel_buffers
    assert terms["weights"] == size(policy.models.policy.parameters())
    assert terms["gradients"] == size(buffer.grad_data for buffer in buffers)
    assert terms["last gradient"] == size(policy.control._previous)
    assert terms["optimizer"] == size(optimizer_tensors(policy))
    copies = [policy.models.old, policy.models.reference]
    assert frozen_copies(config) == 2
    assert terms["frozen"] == sum(size(copy.weights) for copy in copies)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_what_the_layers_keep(architecture, recompute):
    """Bytes saved for the backward pass by two more layers, counted once per storage."""
    tokens = 96
    shapes = [
        ModelShape(
            architecture=architecture,
            layers=layers,
            hidden=64,
            heads=8,
            kv_heads=2,
            head_dim=16,
            intermediate=96,
            vocabulary=100,
            context=4096,
            rope_theta=1e4,
            norm_eps=1e-6,
            tied=False,
        )
        for layers in (2, 4)
    ]
    few, many = (saved_bytes(shape, recompute, tokens) for shape in shapes)
    real = (many - few) / 2 / tokens / 4
    predicted = shapes[0].hidden if recompute else layer_elements(shapes[0], Parallel())
    assert real <= predicted <= 1.02 * real


def saved_bytes(shape, recompute, tokens):
    from engine.model.build import Computation, build_model, logits
    from engine.model.layout import layout

    model = build_model(shape, Computation(recompute=recompute))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no storage is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits(model, layout([(list(range(8)), [[1] * (tokens - 8)])]))
    return sum(amount for amount, _ in kept.values())
