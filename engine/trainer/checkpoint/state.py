"""Names and shards of a checkpoint's tensors. They are the same for every layout and for all of Megatron's optimizers.

`policy.*` are the exact weights (the optimizer's fp32 master weights if it has some), `old.*` those of the old policy.
`optimizer.state.exp_avg.policy.*` and `…exp_avg_sq…` are Adam's moments in the shapes of the weights,
`gradient.policy.*` is the last gradient for gradient control, `rng.RANK.*` are a rank's random streams. No name depends
on shards or optimizer classes, so any layout can load a checkpoint of any other.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
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
"""Megatron's ShardedTensor, which is this rank's part of a tensor with its position in the whole, or a
ShardedTensorFactory, which splits one tensor into two (SwiGLU's gate and up weights)."""
Parts = dict[str, Part]
PartTree = dict[str, Any]
"""Parts by name, nested: Megatron's sharded state dict. After loading, tensors replace the parts."""

MASTER = "param"
"""Megatron's name for the optimizer's fp32 copy of the weights."""
MOMENTS = ("exp_avg", "exp_avg_sq")
PREFIX = "optimizer.state"


def present_layout() -> dict[str, int]:
    """Return the sizes of the current parallel layout."""
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
    }


def updates_of(optimizer: MegatronOptimizer) -> int:
    """Return the number of updates the optimizer has made; 0 on a rank without parameters."""
    for base in _base_optimizers(optimizer):
        for counted in (*base.optimizer.state.values(), *base.optimizer.param_groups):
            if "step" in counted:
                return int(counted["step"])
    return 0


def state_to_save(policy: Policy, updates: int) -> PartTree:
    """Return this rank's parts of a checkpoint, for `dist_checkpointing.save`. Collective over the replicas."""
    weights = _weight_parts(policy.models.policy, "policy.")
    state: PartTree = {"policy": weights, "rng": _rng_parts(policy)}
    if updates:  # before the first update Adam has no state
        state["optimizer"] = {}
        for number, base in enumerate(_base_optimizers(policy.optimizer)):
            parts = _optimizer_parts(base, weights, loading=False)
            state["policy"] = _with_master_weights(weights, parts.pop(MASTER, {}), state["policy"])
            state["optimizer"][str(number)] = parts
    if policy.models.old is not None:
        state["old"] = _weight_parts(policy.models.old.model(), "old.")
    if policy.control is not None and (last := policy.control.previous()) is not None:
        state["gradient"] = _gradient_parts(weights, last)
    return state


def _gradient_parts(weights: Parts, by_parameter: dict[int, Tensor]) -> Parts:
    """Return the last gradient's parts, sharded like the weights."""
    return {
        name: _sharded_like(part, f"gradient.{part.key}", by_parameter[id(part.data)]) for name, part in weights.items()
    }


@torch.no_grad()
def load_state(folder: str, policy: Policy, updates: int, same_layout: bool, gradient_control: ControlState) -> None:
    """Load a checkpoint's tensors; the random streams only if `same_layout`. Collective over all ranks."""
    if policy.control is not None and gradient_control:
        policy.control.load_state(gradient_control)
        last = policy.control.previous(loading=True)
        _load_into(folder, _gradient_parts(_weight_parts(policy.models.policy, "policy."), last or {}))
    load_policy(folder, policy.models.policy)
    if policy.models.old is not None:
        old = policy.models.old.model()
        _load_into(folder, _weight_parts(old, "old."))
        policy.models.old.set(list(old.parameters()))
    if updates:
        _load_optimizer(folder, policy.optimizer, _weight_parts(policy.models.policy, "policy."), updates)
    else:
        policy.optimizer.reload_model_params()
    if same_layout:
        streams = _load_rng(folder)
        np.random.set_state(json.loads(bytes(streams.pop("numpy").tolist())))
        policy.platform.set_rng_state(streams)


@torch.no_grad()
def load_policy(folder: str, model: GPTModel) -> None:
    """Load a checkpoint's policy into this rank's part of a model, cast to its dtype. Collective over all ranks."""
    _load_into(folder, _weight_parts(model, "policy."))


def _weight_parts(model: GPTModel, prefix: str) -> Parts:
    """Return the model's parameters as parts, by name. After Megatron has loaded into a part, its data is detached.

    Transformer Engine's extra objects are left out because they are empty.
    """
    state = model.sharded_state_dict(prefix, metadata=_metadata())
    return {name: part for name, part in state.items() if isinstance(part, ShardedTensor | ShardedTensorFactory)}


def _metadata() -> dict[str, object]:
    return {
        "singleton_local_shards": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _base_optimizers(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """Yield the optimizers in Megatron's chain (the experts have a separate one), except those without parameters."""
    for base in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not base.is_stub_optimizer:
            yield base


def _optimizer_parts(base: MegatronOptimizer, weights: Parts, loading: bool) -> dict[str, Parts]:
    """Return the optimizer's tensors by kind (MOMENTS and, if it has master weights, MASTER) and name.

    They have the shapes of the weights. The distributed optimizer uses its own names and gathers what its replicas
    share: this is a collective over the replicas.
    """
    if isinstance(base, DistributedOptimizer):
        found = base.sharded_param_state_fully_reshardable(dict(weights), loading, _metadata())
        kinds = (*MOMENTS, MASTER)
        parts = {kind: {str(place): found[place][kind] for place in found} for kind in kinds}
        parts[MASTER] = {name: _without_prefix(part) for name, part in parts[MASTER].items()}
        return parts
    parts = {kind: dict[str, Part]() for kind in (*MOMENTS, MASTER)}
    owned = {main for group in base.optimizer.param_groups for main in group["params"]}
    for name, part in weights.items():
        main = getattr(part.data, "main_param", part.data)
        if main in owned:
            for kind in MOMENTS:
                parts[kind][name] = _sharded_like(part, f"{PREFIX}.{kind}.{part.key}", base.optimizer.state[main][kind])
        if main in owned and main is not part.data:
            parts[MASTER][name] = _sharded_like(part, part.key, main)
    return parts


def _without_prefix(part: Part) -> Part:
    return replace(part, key=part.key.removeprefix(f"{PREFIX}.{MASTER}."))


def _sharded_like(part: Part, key: str, tensor: Tensor) -> Part:
    """Return a tensor of the weight's shape as a part, sharded like the weight."""
    own = {"dtype": tensor.dtype} if isinstance(part, ShardedTensor) else {}
    return replace(part, key=key, data=tensor, **own)


def _with_master_weights(weights: Parts, masters: Parts, into: Parts) -> Parts:
    """Return `into` with master weights replacing the weights that are not fp32."""
    names = {part.key: name for name, part in weights.items()}
    exact = {names[part.key]: part for part in masters.values()}
    return into | {name: part for name, part in exact.items() if weights[name].data.dtype != torch.float32}


def _load_optimizer(folder: str, optimizer: MegatronOptimizer, weights: Parts, updates: int) -> None:
    """Load Adam's moments, its update count, and the master weights if the optimizer has some."""
    bases = list(_base_optimizers(optimizer))
    for base in bases:
        _make_room(base)
    parts = {str(number): _optimizer_parts(base, weights, loading=True) for number, base in enumerate(bases)}
    loaded = _load_tensors(folder, parts)
    for number, base in enumerate(bases):
        if isinstance(base, DistributedOptimizer):
            base.load_parameter_state_from_fully_reshardable(_by_number(loaded.get(str(number), {})))
        else:
            _copy_into(loaded.get(str(number), {}), parts[str(number)])
        _set_updates(base.optimizer, updates)


def _make_room(base: MegatronOptimizer) -> None:
    """Allocate the moments to load into, and drop torch's update count.

    Megatron's distributed optimizer can't load once torch's Adam has started to count.
    """
    for state in base.optimizer.state.values():
        state.pop("step", None)
    base.init_state_fn(base.optimizer, base.config)


def _by_number(loaded: dict[str, dict[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    """Return loaded tensors in the distributed optimizer's form: by number of the parameter, then by kind."""
    return {int(place): {kind: loaded[kind][place] for kind in loaded} for place in loaded.get(MASTER, {})}


def _set_updates(adam: torch.optim.Optimizer, updates: int) -> None:
    """Set Adam's update count.

    torch counts in one tensor per parameter. The tensors are incremented in place, so they must not be shared, and the
    fused kernel needs them on the parameter's device. Other fused Adams count once per group.
    """
    counts_itself = isinstance(adam, (torch.optim.Adam, torch.optim.AdamW))
    for group in adam.param_groups:
        if not counts_itself:
            group["step"] = updates
            continue
        for main in group["params"]:
            place = main.device if group.get("fused") else None
            adam.state[main]["step"] = torch.tensor(float(updates), device=place)


def _rng_parts(policy: Policy) -> Parts:
    mine = f"rng.{dist.get_rank():05d}."
    own = json.dumps(np.random.get_state(legacy=False), default=np.ndarray.tolist)
    streams = {**policy.platform.rng_state(), "numpy": torch.frombuffer(bytearray(own.encode()), dtype=torch.uint8)}
    return {name: ShardedTensor.from_rank_offsets(mine + name, state) for name, state in streams.items()}


def _load_rng(folder: str) -> dict[str, Tensor]:
    """Return this rank's saved random streams by name."""
    mine = f"rng.{dist.get_rank():05d}."
    there = dist_checkpointing.load_tensors_metadata(folder)
    parts = {
        key: ShardedTensor.from_rank_offsets(key, torch.empty(part.global_shape, dtype=torch.uint8))
        for key, part in there.items()
        if key.startswith(mine)
    }
    return {key.removeprefix(mine): state for key, state in _load_tensors(folder, parts).items()}


def _load_into(folder: str, parts: Parts) -> None:
    _copy_into(_load_tensors(folder, parts), parts)


def _copy_into(loaded: PartTree, parts: PartTree) -> None:
    """Copy loaded tensors into the data of their parts. Most were already read directly into it."""
    for name, part in parts.items():
        if isinstance(part, dict):
            _copy_into(loaded.get(name, {}), part)
        else:
            part.data.copy_(loaded[name])


def _load_tensors(folder: str, parts: PartTree) -> PartTree:
    """Return the tree with tensors replacing the parts. Megatron leaves out subtrees that would be empty."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about how Megatron calls it
        loaded: PartTree = dist_checkpointing.load(parts, folder)
    return loaded
