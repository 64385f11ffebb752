"""Which devices of which node the parts of a run take. Trainer ranks take the first devices of every training node."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pydantic import ValidationError

from engine.config import Config


def joining_nodes(config: Config) -> int:
    """Number of nodes that the instances of dry_run.joining need."""
    return math.ceil(config.dry_run.joining / max(1, config.platform.devices_per_node // config.rollout.tensor))


class Bundles(NamedTuple):
    """What a run asks of a cluster: an amount by resource for each of its parts."""

    nodes: list[dict[str, float]]
    """The trainer nodes, with the ranks of [stages.reference] on the first. Empty for an evaluation."""
    instances: list[dict[str, float]]
    """The rollout instances."""


def bundles_of(config: Config, kind: str, training: bool = True) -> Bundles:
    """The bundles of a run whose instances all join. `kind`: the cluster's resource for a device: "NPU", "GPU", or
    "CPU", where each rank and instance counts as one. The embedded engine runs on CPUs everywhere."""
    nodes = [{kind: float(config.parallel.ranks_per_node)} for _ in range(config.parallel.nodes)]
    nodes[0][kind] += config.scorer_ranks
    instance = {"CPU": 1.0} if config.rollout.engine == "embedded" else {kind: float(config.rollout.tensor)}
    return Bundles(nodes if training else [], [dict(instance) for _ in range(config.dry_run.joining)])


def all_joining(config: Config) -> Config:
    """The config where, with cluster.engine = "ray", all instances join: the run starts none itself. A second call
    changes nothing."""
    rollout = config.rollout
    if config.cluster.engine != "ray" or not rollout.instances:
        return config
    return config.model_copy(
        update={
            "rollout": rollout.model_copy(update={"instances": 0, "devices": []}),
            "dry_run": config.dry_run.model_copy(update={"joining": config.dry_run.joining + rollout.instances}),
        }
    )


def on_fewer_nodes(config: Config, nodes: int) -> Config | None:
    """The config of a run that goes on with at most this number of trainer nodes, and with as many ranks on each as
    before: with fewer replicas of the model. None where there are fewer nodes than cluster.least_nodes, or no layout
    fits."""
    layout = config.parallel
    least = config.cluster.least_nodes or layout.nodes
    for left in range(min(nodes, layout.nodes), least - 1, -1):
        data, rest = divmod(layout.data * left, layout.nodes)
        if rest or not data:
            continue
        tree = config.model_dump(exclude_unset=True)
        rendezvous = layout.rendezvous if left > 1 else ""
        tree["parallel"] |= {"data": data, "nodes": left, "rendezvous": rendezvous}
        with contextlib.suppress(ValidationError):
            return Config.model_validate(tree)
    return None


def describe_placing(config: Config) -> Iterator[str]:
    """Lines for people that say where each part of the run stands; none where nothing is placed on devices."""
    if not config.places_on_devices:
        return
    yield f"trainer ranks on devices 0 to {config.parallel.ranks_per_node - 1} of their nodes"
    if scored := scorer_devices(config):
        yield f"the ranks of [stages.reference] on devices {scored} of the first node"
    if config.rollout.instances:
        yield f"the run's own instances on devices {config.rollout.devices} of the first node (rollout.devices)"
    if config.dry_run.joining:
        yield f"{config.dry_run.joining} instances that join on other nodes"


def scorer_devices(config: Config) -> list[int]:
    """Numbers of the accelerators of the ranks of [stages.reference] on the first node: those that it names, else those
    after the trainer's."""
    stage = config.reference_stage
    first = config.parallel.ranks_per_node
    return stage.devices or list(range(first, first + stage.ranks)) if stage is not None else []


def count_devices(config: Config, instances: int | None = None) -> int:
    """Number of devices of the trainer, the scorers and so many instances, by default all of the config. The run's own
    come first; a device of rollout.devices that trainer ranks use, too (rollout.share_devices), counts once."""
    rollout = config.rollout
    count = rollout.instances + config.dry_run.joining if instances is None else instances
    alone = config.parallel.ranks + config.scorer_ranks + count * rollout.tensor
    if not rollout.share_devices:
        return alone
    ranks = config.parallel.ranks_per_node
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(ranks)))
    trained = {one.strip() for one in seen.split(",")[:ranks]}
    return alone - len(trained.intersection(map(str, rollout.devices[: count * rollout.tensor])))


def find_overlaps(config: Config, visible: Sequence[int] = ()) -> Iterator[str]:
    """Reasons why the run's own instances, on the first training node, would get devices that others have, if vLLM runs
    on devices.

    `visible`: the devices that ranks see, in their order, if the environment names them; empty: devices from 0 on.
    """
    own = config.rollout.instances
    named = config.rollout.devices
    if not own:
        return
    ranks = 0 if config.platform.device == "cpu" else config.parallel.ranks_per_node
    trained = list(visible or range(ranks))[:ranks]
    scored = [dict(enumerate(visible)).get(one, one) for one in scorer_devices(config)] if ranks else []
    needed = own * config.rollout.tensor
    if not named:
        if trained or own > 1:
            others = ", which trainer ranks use" if trained else ""
            yield (
                f"rollout.devices is empty, so each of the {own} instances that the run starts takes devices from 0 "
                f"on{others}: {_remedy(config, [*trained, *scored], visible, needed)}"
            )
        return
    if len(named) != needed:
        tensor = config.rollout.tensor
        yield f"rollout.devices names {len(named)} devices, {own} instances of rollout.tensor = {tensor} take {needed}"
    if taken := sorted(set(named) & set(trained)):
        if not config.rollout.share_devices:
            yield (
                f"rollout.devices includes {taken}, which the trainer ranks use; they use {trained} "
                "(rollout.share_devices = true lets both use them)"
            )
        elif (backend := config.weights.transport) in ("nccl", "hccl"):
            yield (
                f'weights.transport = "{backend}" does not connect two processes of one device, and rollout.devices '
                f'includes {taken}, which the trainer ranks use; use "file" or "gloo"'
            )
    if taken := sorted(set(named) & set(scored)):
        yield f"rollout.devices includes {taken}, which the ranks of [stages.reference] use; they use {scored}"
    if twice := sorted({device for device in named if named.count(device) > 1}):
        yield f"rollout.devices names {twice} more than once"


def _remedy(config: Config, taken: Sequence[int], visible: Sequence[int], needed: int) -> str:
    """What to set instead: the node's free devices, or instances on other nodes if there are too few."""
    free = [device for device in visible or range(config.platform.devices_per_node) if device not in taken][:needed]
    if len(free) == needed:
        return f"set rollout.devices = {free}"
    joining = config.dry_run.joining + config.rollout.instances
    return (
        f"they need a separate node; set rollout.instances = 0 and dry_run.joining = {joining}, and start them there "
        "(with on_rollout_pool, or metronome serve --join)"
    )
