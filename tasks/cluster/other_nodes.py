"""Has instances and trainer nodes run on other nodes during a training or an evaluation: on a Ray cluster
(tasks.cluster.ray.placement), or as flow runs of other deployments on Prefect's work pools. Without both, a run has its
own machine, and a person starts the rest."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Cancelling

from engine.config import Config
from engine.errors import ProcessDied
from engine.evaluation.benchmarks import with_evaluation_context
from engine.run.commands import training_node_command
from engine.run.files import append_line, read_lines
from engine.run.folder import dump_config
from engine.run.process import Child
from engine.wire.address import ADDRESS_FILE
from tasks.cluster.ray.placement import Placed, running_on_ray
from tasks.terminal.console import named_deployment, print_error

INSTANCES = "serve-rollouts/serve-rollouts"
"""Deployment for a node of the rollout pool (infra/prefect.yaml)."""
RANKS = "join-training/join-training"
"""Deployment for each further node of the training pool."""
POLL_S = 1.0
NOTES = "companions.jsonl"
"""File that lists the flow runs that were started, in the run folder or in the meeting place of an evaluation. With it
they can be cancelled even if the process that started them was killed."""
NODE_END_S = 60.0
"""Seconds that a node has to end after the training before it is cancelled. Its ranks end with those of the
orchestrator."""


@contextmanager
def other_nodes(config: Config, pool_instances: int = 0) -> Iterator[Placed]:
    """During the body, other nodes run the instances that join, and ranks on each of parallel.nodes except this one.

    On work pools there are `pool_instances`. They find the run by its folder, which all nodes must share. Flow runs
    left behind by a killed attempt are cancelled first. Each node with instances has one flow run (`share_instances`).
    """
    folder = config.folder.resolve()
    if config.cluster.engine == "ray":
        with running_on_ray(config, folder) as placed:
            yield placed
        return
    notes = _no_others(folder)
    with ExitStack() as stack:
        _instances(stack=stack, config=config, count=pool_instances, place=folder, join=folder, notes=notes)
        for node in range(1, config.parallel.nodes):
            name = f"node {node} of {config.run.name}"
            stack.enter_context(
                _flow_run_during(
                    deployment=RANKS, parameters={"folder": str(folder)}, name=name, notes=notes, end_s=NODE_END_S
                )
            )
        yield Placed(config, lambda: config)  # the agents wait for each other (engine.trainer.ranks.agent)


@contextmanager
def evaluation_nodes(
    config: Config, model: Path, pool_instances: int, meeting: Path
) -> Iterator[tuple[Config, Path | None]]:
    """During the body, which is an evaluation, other nodes run instances that load a model folder: on a Ray cluster
    those of the config, else `pool_instances` on the rollout pool.

    `meeting`: a folder for this evaluation only, which all nodes of work pools must share. If there are instances, it
    is created, and yielded with the config of the evaluation. Instances of the training, or of an evaluation of another
    model, have other weights; they do not know this folder or its address, so they cannot join.
    """
    on_ray = config.cluster.engine == "ray" and config.dry_run.joining
    if not pool_instances and not on_ray:
        yield config, None
        return
    meeting = meeting.resolve()
    meeting.mkdir(parents=True, exist_ok=True)
    if on_ray:
        with running_on_ray(with_evaluation_context(config), meeting, model) as placed:
            listen = config.rollout.model_copy(update={"listen": placed.config.rollout.listen})
            yield config.model_copy(update={"rollout": listen}), meeting
        return
    notes = _no_others(meeting)
    given = config.model.model_copy(update={"path": str(model.resolve())})
    dump_config(with_evaluation_context(config).model_copy(update={"model": given}), meeting / "config.toml")
    with ExitStack() as stack:
        _instances(
            stack=stack, config=config, count=pool_instances, place=meeting, join=meeting / ADDRESS_FILE, notes=notes
        )
        yield config, meeting


def _no_others(place: Path) -> Path:
    """Cancel the flow runs that an earlier attempt has left in a place. Return the file for the new ones."""
    notes = place / NOTES
    for note in read_lines(notes):
        _cancel(UUID(note["flow_run_id"]))
    notes.unlink(missing_ok=True)
    return notes


def _instances(stack: ExitStack, config: Config, count: int, place: Path, join: Path, notes: Path) -> None:
    """Start flow runs with instances of the config in `place`. It is no recipe for them: to a recipe, a flow run adds
    the keys of the deploy, such as a model other than the one that this run goes on from."""
    common = {"join": str(join), "config": str(place / "config.toml")}
    for share in share_instances(config, count):
        stack.enter_context(
            _flow_run_during(
                deployment=INSTANCES,
                parameters=common | {"instances": share},
                name=f"instances of {config.run.name}",
                notes=notes,
                end_s=0.0,
            )
        )


def share_instances(config: Config, instances: int) -> list[int]:
    """Number of instances on each node of the rollout pool: as many as its devices allow, and the rest on the last
    node."""
    most = max(1, config.platform.devices_per_node // config.rollout.tensor)
    return [min(most, instances - begun) for begun in range(0, instances, most)]


@contextmanager
def _flow_run_during(
    deployment: str, parameters: Mapping[str, Any], name: str, notes: Path, end_s: float
) -> Iterator[None]:
    """Run a deployment during the body. After the body, the flow run has `end_s` seconds to end before it is cancelled.
    If the body raises, it is cancelled immediately."""
    flow, _, name_in_file = deployment.partition("/")
    deployment = f"{flow}/{named_deployment(name_in_file)}"
    flow_run = run_deployment(deployment, parameters=dict(parameters), timeout=0, flow_run_name=name)
    try:
        append_line(notes, {"flow_run_id": str(flow_run.id), "name": name})
        yield
        if end_s:
            _wait_for_end(flow_run.id, end_s)
    finally:
        _cancel(flow_run.id)


def _wait_for_end(flow_run: UUID, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            state = client.read_flow_run(flow_run).state
            if state is not None and state.is_final():
                return
            time.sleep(POLL_S)


def _cancel(flow_run: UUID) -> None:
    """Cancel a flow run that is running, or that has crashed and might be resumed (tasks.cluster.watchdog).

    If it has failed, print why, because the run that waits for it will fail as well.
    """
    with get_client(sync_client=True) as client:
        try:
            found = client.read_flow_run(flow_run)
        except ObjectNotFound:  # the note is from another server, or the flow run was deleted
            return
        state = found.state
        if state is not None and state.is_failed():
            print_error(f"warning: the flow run {found.name} has failed: {state.message}")
        if state is not None and (not state.is_final() or state.is_crashed()):
            client.set_flow_run_state(
                flow_run, Cancelled() if state.is_scheduled() or state.is_crashed() else Cancelling()
            )


def run_node(folder: Path, wait_s: float) -> None:
    """Run this node's trainer ranks of the run in a folder until its training is done. Raises ProcessDied with the
    reason."""
    log = folder / "logs" / "nodes.log"
    child = Child("node of trainer ranks", training_node_command(folder, wait_s), log)
    try:
        while child.alive:
            try:
                child.process.wait(POLL_S)  # in short waits, between which Prefect can cancel this flow
            except subprocess.TimeoutExpired:
                continue
        if child.process.returncode:
            raise ProcessDied(f"{child.name} {child.how_it_ended()}")
    finally:
        child.stop(8.0)  # seconds that its ranks have to end
