"""Which devices of which node the parts of a run take: trainer ranks take the first ones of every training node."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from engine.config import Config


def joining_nodes(config: Config) -> int:
    """Nodes that the instances of dry_run.joining fill."""
    return math.ceil(config.dry_run.joining / max(1, config.platform.devices_per_node // config.rollout.tensor))


def places(config: Config) -> Iterator[str]:
    """Who is where, for people; nothing where there are no devices to place on, as on a CPU."""
    if not config.places_on_devices:
        return
    yield f"trainer ranks on devices 0 to {config.parallel.ranks_per_node - 1} of their nodes"
    if config.rollout.instances:
        yield f"the run's own instances on {config.rollout.devices} of the first one (rollout.devices)"
    if config.dry_run.joining:
        yield f"{config.dry_run.joining} instances that join on other nodes"


def overlaps(config: Config, visible: Sequence[int] = ()) -> Iterator[str]:
    """Why instances that the run itself starts, on the first training node, would get devices of others if vLLM is on
    devices.

    `visible`: the devices that ranks see, in their order, where the environment names them; else they see those from 0
    on.
    """
    own = config.rollout.instances
    named = config.rollout.devices
    if not own:
        return
    ranks = 0 if config.platform.device == "cpu" else config.parallel.ranks_per_node
    trained = list(visible or range(ranks))[:ranks]
    needed = own * config.rollout.tensor
    if not named:
        if trained or own > 1:
            others = ", which trainer ranks have" if trained else ""
            yield (
                f"rollout.devices is empty, so each of the {own} instances that the run starts takes devices from 0 "
                f"on{others}: {_remedy(config, trained, visible, needed)}"
            )
        return
    if len(named) != needed:
        tensor = config.rollout.tensor
        yield f"rollout.devices names {len(named)} devices, {own} instances of rollout.tensor = {tensor} take {needed}"
    if taken := sorted(set(named) & set(trained)):
        yield f"rollout.devices names {taken}, which trainer ranks have; theirs are {trained}"
    if twice := sorted({device for device in named if named.count(device) > 1}):
        yield f"rollout.devices names {twice} more than once"


def _remedy(config: Config, trained: Sequence[int], visible: Sequence[int], needed: int) -> str:
    free = [device for device in visible or range(config.platform.devices_per_node) if device not in trained][:needed]
    if len(free) == needed:
        return f"set rollout.devices = {free}"
    joining = config.dry_run.joining + config.rollout.instances
    return (
        f"they need a node of their own; set rollout.instances = 0 and dry_run.joining = {joining}, and start them "
        "there (on_rollout_pool, or metronome serve --join)"
    )
