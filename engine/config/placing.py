"""Which devices of which node the parts of a run take, on paper: trainer ranks take those from 0 on, of every training node."""

from __future__ import annotations

import math
from collections.abc import Iterator

from engine.config import Config


def joining_nodes(config: Config) -> int:
    """Nodes that the instances of rollout.joining fill."""
    return math.ceil(config.rollout.joining / max(1, config.platform.devices_per_node // config.rollout.tensor))


def places(config: Config) -> Iterator[str]:
    """Who is where, for people; nothing where there are no devices to place on, as on a CPU."""
    if not config.places_on_devices:
        return
    yield f"trainer ranks on devices 0 to {config.parallel.ranks_per_node - 1} of their nodes"
    if config.rollout.instances:
        yield f"the run's own instances on {config.rollout.devices} of the first one (rollout.devices)"
    if config.rollout.joining:
        yield f"{config.rollout.joining} instances that join on other nodes"


def overlaps(config: Config) -> Iterator[str]:
    """Why instances that the run itself starts, on the first training node, would get devices of others if vLLM is on devices."""
    own, named = config.rollout.instances, config.rollout.devices
    if not own:
        return
    ranks, node, needed = config.parallel.ranks_per_node, config.platform.devices_per_node, own * config.rollout.tensor
    if not named:
        yield (f"rollout.devices is empty, so each of the {own} instances that the run starts takes devices from 0 on, which "
               f"trainer ranks have: {_remedy(config, ranks, needed)}")
        return
    if len(named) != needed:
        tensor = config.rollout.tensor
        yield f"rollout.devices names {len(named)} devices, {own} instances of rollout.tensor = {tensor} take {needed}"
    if taken := sorted(set(named) & set(range(ranks))):
        yield f"rollout.devices names {taken}, which trainer ranks have (0 to {ranks - 1})"
    if twice := sorted({device for device in named if named.count(device) > 1}):
        yield f"rollout.devices names {twice} more than once"
    if beyond := sorted({device for device in named if not 0 <= device < node}):
        yield f"rollout.devices names {beyond}, and a node has 0 to {node - 1} (platform.devices_per_node)"


def _remedy(config: Config, first: int, needed: int) -> str:
    if first + needed <= config.platform.devices_per_node:
        return f"set rollout.devices = {list(range(first, first + needed))}"
    joining = config.rollout.joining + config.rollout.instances
    return (f"they need a node of their own; set rollout.instances = 0 and rollout.joining = {joining}, and start them there "
            "(on_rollout_pool, or metronome serve --join)")
