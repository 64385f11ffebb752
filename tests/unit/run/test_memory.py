"""The dry run's memory against what the trainer really allocates:
parameters, gradients, optimizer states, activations."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine import platform
from engine.config.training import Parallel
from engine.model.shape import Experts, ModelShape
from engine.run.memory import _states, frozen_copies, rank_parameters, stage_elements
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
    policy = Policy(config, platform.get_platform("cpu"))
    policy.start_step()
    policy.reduce_gradients(1)
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


SETTINGS = [False, "selective", 1, 3, True]


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("recompute", SETTINGS)
def test_activations_are_what_the_layers_keep(architecture, recompute):
    """Bytes that live on for the backward pass of two more layers, by setting of train.recompute."""
    assert_counted([a_shape(architecture, layers) for layers in (2, 4)], recompute)


@pytest.mark.parametrize("recompute", SETTINGS)
def test_activations_of_a_mixture_are_what_its_layers_keep(recompute, monkeypatch):
    """With all experts at once, as on a device: one after the other they keep the product times the share, too."""
    from engine.model import experts

    monkeypatch.setattr(experts, "product_for", lambda x, *sizes: experts._by_torch)
    mixtures = [Experts(8, 2, 48, normalised=True, layers=tuple(range(layers))) for layers in (2, 4)]
    shapes = [a_shape("Qwen3MoeForCausalLM", len(one.layers), experts=one) for one in mixtures]
    assert_counted(shapes, recompute)


def a_shape(architecture, layers, **changes):
    return ModelShape(
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
        **changes,
    )


def assert_counted(shapes, recompute):
    tokens = 96
    few, many = (kept_bytes(shape, recompute, tokens) for shape in shapes)
    real = (many - few) / tokens / 4
    few, many = (stage_elements(shape, Parallel(), recompute) for shape in shapes)
    routes = (
        32 if shapes[0].experts and recompute not in (False, "selective") else 0
    )  # Megatron's dispatchers keep them
    assert real - routes <= many - few <= 1.02 * real


def kept_bytes(shape, recompute, tokens):
    """Bytes of all that a forward pass makes and that lives on after it, counted once per storage."""
    from engine.model.build import Computation, build_model, compute_hidden
    from engine.model.layout import make_layout

    model = build_model(shape, Computation(recompute=recompute))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with Made() as made:
        out = compute_hidden(model, make_layout([(list(range(8)), [[1] * (tokens - 8)])]))
    assert out.requires_grad
    alive = {place: size for place, (storage, size) in made.storages.items() if not storage.expired()}
    return sum(size for place, size in alive.items() if place not in parameters)


class Made(TorchDispatchMode):
    """Remembers the storage of each operation's outputs, without keeping it."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        return found
