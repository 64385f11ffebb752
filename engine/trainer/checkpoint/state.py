"""What a checkpoint's tensors are called and how they are cut: the same for every layout and each of Megatron's
optimizers.

`policy.*` are the exact weights (the optimizer's fp32 master weights where it has some), `old.*` the old policy's,
`optimizer.state.exp_avg.policy.*` and `…exp_avg_sq…` Adam's moments in the shapes of the weights, `rng.RANK.*` a rank's
random streams. Names say nothing of shards or optimizer classes, so what one layout saves, another loads.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from engine.trainer.gradient_control import ControlState
from engine.trainer.policy import Policy

Part = Any
"""Megatron's ShardedTensor: this rank's part of a tensor and its place in the whole. A factory of them stands for two
(SwiGLU's gate and up weights)."""
Parts = dict[str, Part]
PartTree = dict[str, Any]
"""Parts, and under a name more of them: what Megatron calls a sharded state dict. Loaded, tensors in their place."""

MASTER = "param"
"""Megatron's name of the optimizer's own copy of the weights."""
MOMENTS = ("exp_avg", "exp_avg_sq")
PREFIX = "optimizer.state"


def layout() -> dict[str, int]:
    """The sizes of the present parallel layout."""
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
    }


def updates_of(optimizer: MegatronOptimizer) -> int:
    """How many updates it has made; 0 where it has no parameters."""
    for base in _bases(optimizer):
        for counted in (*base.optimizer.state.values(), *base.optimizer.param_groups):
            if "step" in counted:
                return int(counted["step"])
    return 0


def state_to_save(policy: Policy, updates: int) -> PartTree:
    """Everything that is in this rank's tensors, for `dist_checkpointing.save`. A collective of the replicas."""
    weights = _weights(policy.models.policy, "policy.")
    state: PartTree = {"policy": weights, "rng": _rng(policy)}
    if updates:  # before the first update Adam has no state
        state["optimizer"] = {}
        for number, base in enumerate(_bases(policy.optimizer)):
            parts = _parts(base, weights, loading=False)
            state["policy"] = _exact(weights, parts.pop(MASTER, {}), state["policy"])
            state["optimizer"][str(number)] = parts
    if policy.models.old is not None:
        state["old"] = _weights(policy.models.old.model(), "old.")
    if policy.control is not None and (last := policy.control.previous()) is not None:
        state["gradient"] = _gradients(weights, last)
    return state


def _gradients(weights: Parts, by_parameter: dict[int, Tensor]) -> Parts:
    """The last gradient, cut as the weights are."""
    return {name: _like(part, f"gradient.{part.key}", by_parameter[id(part.data)]) for name, part in weights.items()}


@torch.no_grad()
def load_state(folder: str, policy: Policy, updates: int, same_layout: bool, gradient_control: ControlState) -> None:
    """Put everything back; the random streams only in the layout that they were saved in. A collective of all ranks."""
    if policy.control is not None and gradient_control:
        policy.control.load(gradient_control)
        last = policy.control.previous(loading=True)
        _load_into(folder, _gradients(_weights(policy.models.policy, "policy."), last or {}))
    _load_into(folder, _weights(policy.models.policy, "policy."))
    if policy.models.old is not None:
        old = policy.models.old.model()
        _load_into(folder, _weights(old, "old."))
        policy.models.old.set(list(old.parameters()))
    if updates:
        _load_optimizer(folder, policy.optimizer, _weights(policy.models.policy, "policy."), updates)
    else:
        policy.optimizer.reload_model_params()
    if same_layout:
        policy.platform.set_rng_state(_load_rng(folder))


def _weights(model: GPTModel, prefix: str) -> Parts:
    """The model's own parameters by name, until Megatron has loaded into them: then they stand detached in the parts.

    Left out: objects that Transformer Engine would fill, empty here.
    """
    state = model.sharded_state_dict(prefix, metadata=_metadata())
    return {name: part for name, part in state.items() if isinstance(part, ShardedTensor | ShardedTensorFactory)}


def _metadata() -> dict[str, object]:
    return {
        "singleton_local_shards": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _bases(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """The optimizers inside Megatron's chain (that of the experts is one of its own),
    without those that have nothing to do."""
    for base in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not base.is_stub_optimizer:
            yield base


def _parts(base: MegatronOptimizer, weights: Parts, loading: bool) -> dict[str, Parts]:
    """The optimizer's tensors by kind (MOMENTS and, if it has its own, MASTER) and name, in the shapes of the weights.

    The distributed optimizer gathers what its replicas share (a collective of theirs) and has names of its own.
    """
    if isinstance(base, DistributedOptimizer):
        found = base.sharded_param_state_fully_reshardable(dict(weights), loading, _metadata())
        kinds = (*MOMENTS, MASTER)
        parts = {kind: {str(place): found[place][kind] for place in found} for kind in kinds}
        parts[MASTER] = {name: _renamed(part) for name, part in parts[MASTER].items()}
        return parts
    parts = {kind: dict[str, Part]() for kind in (*MOMENTS, MASTER)}
    owned = {main for group in base.optimizer.param_groups for main in group["params"]}
    for name, part in weights.items():
        main = getattr(part.data, "main_param", part.data)
        if main in owned:
            for kind in MOMENTS:
                parts[kind][name] = _like(part, f"{PREFIX}.{kind}.{part.key}", base.optimizer.state[main][kind])
        if main in owned and main is not part.data:
            parts[MASTER][name] = _like(part, part.key, main)
    return parts


def _renamed(part: Part) -> Part:
    return replace(part, key=part.key.removeprefix(f"{PREFIX}.{MASTER}."))


def _like(part: Part, key: str, tensor: Tensor) -> Part:
    """A tensor of the weight's shape, cut as the weight is."""
    own = {"dtype": tensor.dtype} if isinstance(part, ShardedTensor) else {}
    return replace(part, key=key, data=tensor, **own)


def _exact(weights: Parts, masters: Parts, into: Parts) -> Parts:
    """`into` with the master weights in the place of those weights that are rounded."""
    names = {part.key: name for name, part in weights.items()}
    exact = {names[part.key]: part for part in masters.values()}
    return into | {name: part for name, part in exact.items() if weights[name].data.dtype != torch.float32}


def _load_optimizer(folder: str, optimizer: MegatronOptimizer, weights: Parts, updates: int) -> None:
    """Adam's moments, its count of updates, and the exact weights where the optimizer has its own."""
    bases = list(_bases(optimizer))
    for base in bases:
        _make_room(base)
    parts = {str(number): _parts(base, weights, loading=True) for number, base in enumerate(bases)}
    loaded = _load(folder, parts)
    for number, base in enumerate(bases):
        if isinstance(base, DistributedOptimizer):
            base.load_parameter_state_from_fully_reshardable(_by_place(loaded.get(str(number), {})))
        else:
            _copy(loaded.get(str(number), {}), parts[str(number)])
        _set_updates(base.optimizer, updates)


def _make_room(base: MegatronOptimizer) -> None:
    """Moments to load into. Megatron's distributed optimizer can't load where torch's
    Adam has begun to count its updates."""
    for state in base.optimizer.state.values():
        state.pop("step", None)
    base.init_state_fn(base.optimizer, base.config)


def _by_place(loaded: dict[str, dict[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    """As the distributed optimizer wants it: its parameters by number, each with its tensors by kind."""
    return {int(place): {kind: loaded[kind][place] for kind in loaded} for place in loaded.get(MASTER, {})}


def _set_updates(adam: torch.optim.Optimizer, updates: int) -> None:
    """torch counts in a tensor per parameter (one each: they are incremented in place), fused Adams once per group."""
    counts_itself = isinstance(adam, (torch.optim.Adam, torch.optim.AdamW))
    for group in adam.param_groups:
        if not counts_itself:
            group["step"] = updates
            continue
        for main in group["params"]:
            adam.state[main]["step"] = torch.tensor(float(updates))


def _rng(policy: Policy) -> Parts:
    mine = f"rng.{dist.get_rank():05d}."
    return {
        name: ShardedTensor.from_rank_offsets(mine + name, state) for name, state in policy.platform.rng_state().items()
    }


def _load_rng(folder: str) -> dict[str, Tensor]:
    """This rank's streams, by name."""
    mine = f"rng.{dist.get_rank():05d}."
    there = dist_checkpointing.load_tensors_metadata(folder)
    parts = {
        key: ShardedTensor.from_rank_offsets(key, torch.empty(part.global_shape, dtype=torch.uint8))
        for key, part in there.items()
        if key.startswith(mine)
    }
    return {key.removeprefix(mine): state for key, state in _load(folder, parts).items()}


def _load_into(folder: str, parts: Parts) -> None:
    _copy(_load(folder, parts), parts)


def _copy(loaded: PartTree, parts: PartTree) -> None:
    """Copy loaded tensors to where their parts lie; most were read right into them."""
    for name, part in parts.items():
        if isinstance(part, dict):
            _copy(loaded.get(name, {}), part)
        else:
            part.data.copy_(loaded[name])


def _load(folder: str, parts: PartTree) -> PartTree:
    """Tensors in the place of their parts; Megatron leaves out what would be empty."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about how Megatron calls it
        loaded: PartTree = dist_checkpointing.load(parts, folder)
    return loaded
