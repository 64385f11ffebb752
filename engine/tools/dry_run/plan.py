"""Plans a run without devices, weights or data: layout, memory per device, and the arithmetic of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from engine.config import Config
from engine.config.placing import count_devices, describe_placing, find_overlaps, joining_nodes
from engine.errors import BadInput, counted
from engine.evaluation.benchmarks import with_evaluation_context
from engine.model.shape import ModelShape
from engine.orchestrator.checks import check_layouts, unfit_rollouts, unreached
from engine.run.limits import Limit, machine_limits, memory_limits
from engine.run.memory import Need, Room, host_bytes, instance_need, is_on_cpu, total_parameters, trainer_need
from engine.run.progress import format_size
from engine.tools.dry_run.duration import describe_duration
from engine.tools.dry_run.model_shape import shape_of


@dataclass(frozen=True)
class RunPlan:
    """The plan of a recipe."""

    config: Config
    shape: ModelShape
    source: str
    """The source of the model's shape."""
    trainer: Need
    instance: Need
    cache: Room

    @property
    def instances(self) -> int:
        """The number of instances: those that the run starts, and those that join (dry_run.joining)."""
        return self.config.rollout.instances + self.config.dry_run.joining

    @property
    def devices(self) -> int:
        """The total number of devices for training, scoring and rollouts."""
        return count_devices(self.config)


def plan_run(config: Config) -> RunPlan:
    """The plan of a run. Raises BadInput with all reasons why the run cannot work."""
    shape, source = shape_of(config.model.path)
    check_layouts(config, shape)
    instance, cache = instance_need(shape, config)
    made = RunPlan(
        config=config, shape=shape, source=source, trainer=trainer_need(shape, config), instance=instance, cache=cache
    )
    reasons = [
        *unfit_rollouts(config, shape),
        *_lengths(made),
        *_batch(made),
        *_devices(made),
        *(() if is_on_cpu(config) else _memory(made.trainer, made.instance)),
        *_too_little(made),
    ]
    _check(reasons)
    return made


def evaluation_sections(config: Config) -> dict[str, dict[str, str]]:
    """The plan of an evaluation alone, which has instances and no trainer, as `plan_sections` gives it. Raises BadInput
    with all reasons why it cannot work."""
    config = with_evaluation_context(config)
    shape, source = shape_of(config.model.path)
    instance, cache = instance_need(shape, config)
    evaluate = config.evaluate
    count = max(1, config.rollout.instances) + config.dry_run.joining
    devices = count * config.rollout.tensor
    told = f"rollouts {count} × {config.rollout.tensor}"
    limits = list(memory_limits(config, shape, training=False))
    reasons = [limit.refusal for limit in limits if not limit.suffices]
    reasons += () if is_on_cpu(config) else _memory(instance)
    _check([*unfit_rollouts(config, shape), *_too_many(config, devices, told), *reasons])
    return {
        "Model": _model(config, shape, source),
        "Devices": {"in all": f"{told} = {devices}"},
        f"Memory of a {instance.who}": _terms(instance) | _cache(cache),
        "Evaluation": {
            "benchmarks": evaluate.benchmark or config.data.heldout or "held-out problems of data.train",
            "problems": f"{'at most ' + str(evaluate.problems) if evaluate.problems else 'all'} of each",
            "responses": f"{evaluate.samples} for each problem, of at most {evaluate.max_new_tokens:,} tokens",
        },
    }


def _check(reasons: list[str]) -> None:
    """Raise BadInput with the reasons if there are any."""
    if reasons:
        told = reasons[0] if len(reasons) == 1 else "".join(f"\n  - {reason}" for reason in reasons)
        raise BadInput(f"this can't run as it stands: {told}")


def _too_many(config: Config, devices: int, told: str) -> Iterator[str]:
    """Reasons why there are too few devices in all, or on a node for an instance. `told`: their sum, in words."""
    given = config.platform.devices
    node = config.platform.devices_per_node
    if given and devices > given:
        yield f"{told} = {devices} devices, and platform.devices gives {given}"
    if config.rollout.tensor > node:
        yield (
            f"rollout.tensor = {config.rollout.tensor} is more than a node has (platform.devices_per_node = {node}): "
            "an instance runs on one node"
        )


def _lengths(made: RunPlan) -> Iterator[str]:
    config = made.config
    longest = config.rollout.max_context
    budget = config.train.micro_batch_tokens
    if budget < longest:
        yield (
            f"train.micro_batch_tokens = {budget:,} is below the longest sequence, rollout.max_context = {longest:,}: "
            "one response would be a micro-batch larger than the budget"
        )


def _batch(made: RunPlan) -> Iterator[str]:
    config = made.config
    train = config.train
    groups = train.prompts_per_step // train.updates
    if config.parallel.replica_groups > groups:
        yield (
            f"{config.parallel.replica_groups} replicas (parallel.data) and {groups} groups in an update "
            f"(train.prompts_per_step = {train.prompts_per_step}, train.updates = {train.updates}): a replica trains "
            "whole groups, so some would never train"
        )


def _devices(made: RunPlan) -> Iterator[str]:
    config = made.config
    yield from _too_many(config, made.devices, _device_sum(made))
    parallel = config.parallel
    node = config.platform.devices_per_node
    if parallel.ranks_per_node > node:
        yield (
            f"parallel.nodes = {parallel.nodes} puts {parallel.ranks_per_node} trainer ranks on each node, which has "
            f"{node} devices (platform.devices_per_node)"
        )
    if config.places_on_devices:
        yield from find_overlaps(config)
        if config.rollout.instances and (
            beyond := sorted({one for one in config.rollout.devices if not 0 <= one < node})
        ):
            yield f"rollout.devices names {beyond}, and a node has 0 to {node - 1} (platform.devices_per_node)"
    yield from unreached(config)


def _memory(*needs: Need) -> Iterator[str]:
    for need in needs:
        if not need.fits:
            yield f"too little memory on a {need.who}: {need.summed()}"


def _too_little(made: RunPlan) -> Iterator[str]:
    """The limits of this machine that do not suffice. If the machine lacks the recipe's devices, the plan is for
    another one."""
    if has_device(made.config):
        yield from (limit.refusal for limit in _machine(made) if not limit.suffices)


def has_device(config: Config) -> bool:
    """Whether this machine has devices of the recipe's kind, so that the plan is for it."""
    device = config.platform.device
    if device in ("auto", "cpu"):
        return True
    from engine.platform import PLATFORMS  # imports torch

    return PLATFORMS[device].present()


def _machine(made: RunPlan) -> Iterator[Limit]:
    yield from machine_limits(made.config, total_parameters(made.shape))
    yield from memory_limits(made.config, made.shape)


def _device_sum(made: RunPlan) -> str:
    parallel = made.config.parallel
    rollout = made.config.rollout
    ranks = " × ".join(str(size) for size in (parallel.tensor, parallel.pipeline, parallel.context, parallel.data))
    scorers = f" + reference {made.config.scorer_ranks}" if made.config.scorer_ranks else ""
    return (
        f"training {ranks} (tensor × pipeline × context × data){scorers} + rollouts {made.instances} × {rollout.tensor}"
    )


def plan_sections(made: RunPlan) -> dict[str, dict[str, str]]:
    """The plan as titled two-column tables."""
    tables = {
        "Model": _model(made.config, made.shape, made.source),
        "Devices": {"in all": f"{_device_sum(made)} = {made.devices}", **dict(_spare(made))},
        f"Memory of a {made.trainer.who}": _terms(made.trainer) | _host(made),
        f"Memory of a {made.instance.who}": _terms(made.instance) | _cache(made.cache),
        "A step": _step(made),
        "Limits of this machine": _limits(made),
    }
    return {title: rows for title, rows in tables.items() if rows}


def _model(config: Config, shape: ModelShape, source: str) -> dict[str, str]:
    return {
        config.model.path: f"{total_parameters(shape):,} parameters ({shape.architecture}, {source})",
        "layers": f"{shape.layers} of {shape.hidden}, {shape.heads} heads, {shape.kv_heads} key-value heads",
        "positions": f"{config.rollout.max_context:,} used of {shape.context:,}",
    }


def _spare(made: RunPlan) -> Iterator[tuple[str, str]]:
    given = made.config.platform.devices
    if given:
        yield (
            "given",
            f"{given} (platform.devices)" + (f", {given - made.devices} stay idle" if given > made.devices else ""),
        )
    ranks = made.config.parallel.ranks_per_node
    training = f"{made.config.parallel.nodes} for training ({counted(ranks, 'rank')} each)"
    apart = f"{joining_nodes(made.config)} for rollouts that join"
    yield "nodes", f"of {made.config.platform.devices_per_node} devices: {training}, {apart}"
    if placed := list(describe_placing(made.config)):
        yield "places", "; ".join(placed)
    if not made.instances:
        yield "note", "rollout.instances and dry_run.joining are 0: all instances join, their devices are not counted"


def _terms(need: Need) -> dict[str, str]:
    rows = {term.name: f"{format_size(term.bytes):>10}  {term.formula}" for term in need.terms}
    return rows | {"sum": f"{format_size(need.total):>10}  of {format_size(need.available)}"}


def _host(made: RunPlan) -> dict[str, str]:
    held = host_bytes(made.shape, made.config)
    return {"on the host": f"{format_size(held):>10}  frozen models of one rank (train.offload)"} if held else {}


def _cache(room: Room) -> dict[str, str]:
    fits = f"room for {room.tokens:,} tokens"
    short = room.tokens < room.wanted
    return {
        "cache": f"{fits}; all slots at full length would fill {room.wanted:,}"
        + (", so they take turns" if short else "")
    }


def _limits(made: RunPlan) -> dict[str, str]:
    return {
        limit.what: str(limit).partition(": ")[2] + ("" if limit.suffices else ": TOO LITTLE if the run were here")
        for limit in _machine(made)
    }


def _step(made: RunPlan) -> dict[str, str]:
    config = made.config
    train = config.train
    rollout = config.rollout
    responses = train.prompts_per_step * rollout.group_size
    whole = max(1, train.micro_batch_tokens // rollout.max_context)
    slots = made.instances * config.groups_in_flight
    replicas = config.parallel.replica_groups
    rows = {
        "batch": f"{counted(train.prompts_per_step, 'prompt')} × {counted(rollout.group_size, 'response')} = "
        f"{counted(responses, 'response')}, "
        f"at most {responses * rollout.max_context:,} tokens",
        "replicas": f"{replicas}, each about {counted(train.prompts_per_step / replicas, 'group')}",
        "micro-batch": f"{train.micro_batch_tokens:,} tokens, {counted(whole, 'response')} at full length; "
        f"at most {math.ceil(responses / whole):,} a step",
        "window": f"up to {config.window_tokens:,} tokens",
        "run": f"{counted(train.steps, 'step')} of mode {train.mode}, {counted(train.steps * responses, 'response')}",
        "updates": f"{train.updates} a step, each of {counted(responses // train.updates, 'response')}; "
        f"{train.steps * train.updates:,} in the run",
    }
    if is_on_cpu(config):
        rows["time here"] = describe_duration(made.shape, config)
    if slots:
        waves = train.prompts_per_step / slots
        rows["rollouts"] = (
            f"{counted(slots, 'group')} in flight ({counted(made.instances, 'instance')} × "
            f"{config.groups_in_flight}), {waves:.1f} waves"
            + (": slots stay empty" if waves < 1 and train.mode in ("sync", "periodic") else "")
        )
    return rows
