"""Flow runs of other deployments that a run has on other nodes for the time of its training."""

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
from engine.run.folder import dump
from engine.run.process import Child
from engine.wire.address import ADDRESS_FILE
from tasks.console import complain

INSTANCES = "serve-rollouts/serve-rollouts"
"""What a run starts on the rollout pool (infra/prefect.yaml)."""
RANKS = "join-training/join-training"
"""What a run starts on the training pool, once for each further node."""
POLL_S = 1.0
NOTES = "companions.jsonl"
"""File in the run folder, or in an evaluation's meeting place: the flow runs that were started for it, so that a
process that is killed leaves none unknown."""
NODE_END_S = 60.0
"""What a node may take to end when the run has trained, before it is cancelled: its ranks end with the launcher's."""
STOP_S = 8.0
"""What the ranks of a node may take to end before they are killed."""


@contextmanager
def other_nodes(config: Config, pool_instances: int = 0) -> Iterator[None]:
    """For the time of the body: instances on the rollout pool, and a node of ranks for each of parallel.nodes but this
    one.

    They find the run by its folder, which all nodes must share. Those of an attempt that was killed are cancelled
    first. The instances come in a flow run for each node that they fill (`shares`).
    """
    folder = config.folder.resolve()
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
        yield


@contextmanager
def evaluation_nodes(config: Config, model: Path, pool_instances: int, meeting: Path) -> Iterator[Path | None]:
    """For the time of the body, which is an evaluation: instances on the rollout pool that load a model folder.

    `meeting`: a folder of this evaluation alone, which all nodes must share; made, and yielded, if there are to be any.
    Instances that are left of the training, or of another model's evaluation, do not know it: they hold other weights.
    """
    if not pool_instances:
        yield None
        return
    meeting = meeting.resolve()
    meeting.mkdir(parents=True, exist_ok=True)
    notes = _no_others(meeting)
    given = config.model.model_copy(update={"path": str(model.resolve())})
    dump(with_evaluation_context(config).model_copy(update={"model": given}), meeting / "config.toml")
    with ExitStack() as stack:
        _instances(
            stack=stack, config=config, count=pool_instances, place=meeting, join=meeting / ADDRESS_FILE, notes=notes
        )
        yield meeting


def _no_others(place: Path) -> Path:
    """Cancel the flow runs that an attempt before has left in a place; the file for the new ones."""
    notes = place / NOTES
    for note in read_lines(notes):
        _cancel(UUID(note["flow_run_id"]))
    notes.unlink(missing_ok=True)
    return notes


def _instances(stack: ExitStack, config: Config, count: int, place: Path, join: Path, notes: Path) -> None:
    """Flow runs with the instances of the config in a place.
    The deployment's own overrides are the recipe's, not this run's."""
    common = {"join": str(join), "recipe": str(place / "config.toml"), "overrides": [], "settings": {}}
    for share in shares(config, count):
        stack.enter_context(
            _flow_run_during(
                deployment=INSTANCES,
                parameters=common | {"instances": share},
                name=f"instances of {config.run.name}",
                notes=notes,
                end_s=0.0,
            )
        )


def shares(config: Config, instances: int) -> list[int]:
    """How many of so many instances each node of the rollout pool gets:
    as many as its devices hold, the last one the rest."""
    most = max(1, config.platform.devices_per_node // config.rollout.tensor)
    return [min(most, instances - begun) for begun in range(0, instances, most)]


@contextmanager
def _flow_run_during(
    deployment: str, parameters: Mapping[str, Any], name: str, notes: Path, end_s: float
) -> Iterator[None]:
    """A flow run of a deployment during the body. Once that is done it has `end_s` seconds to end by itself."""
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
    """End a flow run that is under way, or that would come back: a crashed one may be resumed (tasks.cluster.watchdog).
    Say it if it has failed: that is why the run, which waits for it, will."""
    with get_client(sync_client=True) as client:
        try:
            found = client.read_flow_run(flow_run)
        except ObjectNotFound:  # noted on another server, or deleted there
            return
        state = found.state
        if state is not None and state.is_failed():
            complain(f"warning: the flow run {found.name} has failed: {state.message}")
        if state is not None and (not state.is_final() or state.is_crashed()):
            client.set_flow_run_state(
                flow_run, Cancelled() if state.is_scheduled() or state.is_crashed() else Cancelling()
            )


def run_node(folder: Path, wait_s: float) -> None:
    """This node's trainer ranks of the run in a folder, until it has trained. Raises ProcessDied with the reason."""
    log = folder / "logs" / "nodes.log"
    child = Child("node of trainer ranks", training_node_command(folder, wait_s), log)
    try:
        while child.alive:
            try:
                child.process.wait(POLL_S)  # in short steps, between which Prefect can cancel this flow
            except subprocess.TimeoutExpired:
                continue
        if child.process.returncode:
            raise ProcessDied(f"{child.name} {child.how_it_ended()}")
    finally:
        child.stop(STOP_S)
