"""Starts rollout instances of a run on a node of the rollout pool, when tasks/cluster/other_nodes.py requests them."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from engine.config import Config, Rollout
from engine.errors import BadInput, DeadlineError
from engine.instance.join import default_name
from engine.run.folder import dump_config
from engine.run.process import Child, stop_all
from engine.run.vllm_command import VISIBLE, device_of, visible_devices, vllm_interpreter
from engine.wire.address import orchestrator_address, split_address
from tasks.terminal.console import say


def serve_until_the_run_ends(config: Config, join: str, count: int, host: str) -> None:
    """Start `count` instances that join a run. End them when its orchestrator has not answered for rollout.wait_s, or
    for rollout.timeout_s at the start.

    `join`: host:port of the orchestrator, or the run folder, or its rollout.address. Each instance has its own devices
    (`own_devices`). Raises BadInput if there are too few devices, DeadlineError if no orchestrator answers at the
    start, and ProcessDied if an instance dies during the run.
    """
    devices = own_devices(config, count)
    elsewhere = config.rollout.model_copy(update={"devices": []})  # those are on the run's own node
    with tempfile.TemporaryDirectory(prefix="metronome-") as scratch:
        recipe = Path(scratch) / "config.toml"
        dump_config(config.model_copy(update={"rollout": elsewhere}), recipe)
        serve = [sys.executable, "-m", "flows.cli", "serve", str(recipe), "--join", join, "--host", host]
        children = []
        try:
            for number, mine in enumerate(devices):
                name = f"{default_name()}-{number}"
                log = recipe.parent / f"{name}.log"
                children.append(Child(f"rollout instance {name}", [*serve, "--name", name], log, mine))
            _accompany(children, join, config.rollout)
        finally:
            stop_all(children, 10.0)  # seconds that they have to leave the run


def own_devices(config: Config, count: int) -> list[dict[str, str]]:
    """The environment variables of each of `count` instances on this node.

    Each gets the next rollout.tensor devices: of those that this process's environment makes visible, or counted from
    0. Empty on a CPU. Raises BadInput if there are too few devices.
    """
    kind = device_of(vllm_interpreter(), config.platform.device) if config.rollout.engine == "vllm" else "cpu"
    if kind not in VISIBLE:
        return [{} for _ in range(count)]
    variable = VISIBLE[kind]
    tensor = config.rollout.tensor
    needed = count * tensor
    given = os.environ.get(variable)
    seen = list(map(str, range(needed))) if given is None else visible_devices(kind)
    if len(seen) < needed:
        raise BadInput(
            f"{variable}={given}: {count} instances of rollout.tensor = {tensor} need {needed} devices; set "
            "platform.devices_per_node to what a node of the rollout pool has"
        )
    return [{variable: ",".join(seen[first : first + tensor])} for first in range(0, needed, tensor)]


def _accompany(children: Sequence[Child], join: str, rollout: Rollout) -> None:
    met = False
    heard = time.monotonic()
    while True:
        if _answers(join):
            if not met:
                say("rollouts", f"{len(children)} instances join the run at {join}")
            met = True
            heard = time.monotonic()
            for child in children:
                child.check_alive()
        elif time.monotonic() - heard > rollout.patience(met)[0]:
            break
        time.sleep(1.0)
    if not met:
        limit, key = rollout.patience(met)
        raise DeadlineError(f"no orchestrator answers at {join} within {limit:.0f} s ({key}): has the run started?")
    say("rollouts", f"the run at {join} has ended")


def _answers(join: str) -> bool:
    """Whether an orchestrator listens there now."""
    try:
        socket.create_connection(split_address(orchestrator_address(join), "join"), timeout=5.0).close()
    except OSError:  # no orchestrator, or a run folder that does not have the file yet
        return False
    return True
