"""The command line of each process of a run, and its additional environment variables."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from engine.config import Config, Queue
from engine.errors import BadInput
from engine.run.process import python_command
from engine.run.watchdogs import WATCHDOGS

TRAINER_RANK = "engine.trainer.rank"
"""Module of a trainer rank."""
AGENT = "engine.trainer.ranks.agent"
"""Module that starts the ranks of a node."""
SCORER_RANK = "engine.trainer.ranks.scorer_rank"
"""Module of a scorer rank."""
EXPANDABLE = "expandable_segments:True"
"""Setting of torch's and torch_npu's allocator: segments of device memory can grow."""
TASK_QUEUE = "2"
"""torch_npu's level of queues between Python and the NPU. Its manual recommends 2, which also prepares an operator's
workspace in a thread of its own, and may take more memory; its default is 1. Not measured here."""
STORE_NODES = "METRONOME_STORE_NODES"
"""Environment variable with the ids of a run's nodes of a Ray cluster, on which its storage units lie. Without it, and
if none of them is alive, they lie on all nodes."""
LOOPBACKS = ("lo", "lo0")
"""Names of the loopback interface, on Linux and on macOS."""


def orchestrator_command(
    config: Path, resume: bool, replay: Path | None, events: int | None = None, attempt: int = 0
) -> list[str]:
    """Command line of the orchestrator. `config`: a resolved config file; `events`: the file descriptor of the pipe
    that gets its events (engine.run.event_stream); `attempt`: number of the attempt to which it belongs, 0 for one of
    its own (engine.run.run_file)."""
    arguments = ["--config", str(config), *(["--resume"] if resume else [])]
    arguments += [] if replay is None else ["--replay", str(replay)]
    arguments += [] if events is None else ["--events", str(events)]
    arguments += ["--attempt", str(attempt)] if attempt else []
    return python_command("engine.orchestrator.launch", *arguments)


def service_command(config: Path) -> list[str]:
    """Command line of the service. `config`: a resolved config file."""
    return python_command("engine.orchestrator.serve", "--config", str(config))


def rank_arguments(
    config: Config, folder: Path, plane: str, weights: Path, attempt: int, resume: bool, replay: Path | None
) -> list[str]:
    """Arguments of every trainer rank. `plane`: URL of the orchestrator's server; `weights`: folder for weights on
    their way to the instances; `attempt`: number of the orchestrator's attempt (engine.run.run_file)."""
    arguments = ["--folder", str(folder.resolve()), "--plane", plane]
    arguments += ["--weights", str(weights), "--threads", str(config.trainer_threads), "--attempt", str(attempt)]
    arguments += ["--resume"] if resume else []
    return arguments + (["--replay", str(replay)] if replay is not None else [])


def agent_command(config: Config, arguments: Sequence[str], run_id: str | None) -> list[str]:
    """Command line of the elastic agent that starts the trainer ranks on the orchestrator's node. `run_id`: given if
    there are several nodes."""
    parallel = config.parallel
    nodes = ["--nodes", str(parallel.nodes), "--rendezvous", parallel.rendezvous, "--run-id", run_id] if run_id else []
    return python_command(AGENT, "--ranks", str(parallel.ranks_per_node), *nodes, "--", *arguments)


def trainer_environment(config: Config, instances_elsewhere: bool) -> dict[str, str]:
    """Environment variables that are added for the agent on the orchestrator's node and its ranks: `rank_defaults`, the
    number of threads, and the network interfaces of collectives.

    On one node, the ranks' collectives listen on loopback only: always those of gloo, and those of NCCL unless the
    trainer also sends weights with it or there may be `instances_elsewhere`. HCCL chooses an interface itself, since
    its manual takes loopback last. On several nodes, each agent chooses
    gloo's interface (engine.trainer.ranks.agent). A variable that the user has set is kept.
    """
    found = rank_defaults(config.parallel.tensor, config.weights.transport)
    found["OMP_NUM_THREADS"] = str(config.trainer_threads)
    if config.parallel.nodes > 1:
        return found
    names = ["GLOO_SOCKET_IFNAME"]  # weights sent with gloo use a separate gloo device (engine.wire.weights.groups)
    if not instances_elsewhere and config.weights.transport != "nccl":
        names.append("NCCL_SOCKET_IFNAME")
    return found | _on_loopback(names)


def rank_defaults(tensor: int, transport: str = "file") -> dict[str, str]:
    """Variables for the ranks of any node, except those that the user has set. `tensor`: size of the tensor layout;
    `transport`: weights.transport, if the ranks send weights.

    Rows vary in length, so segments of a fixed size would fragment device memory. Megatron overlaps collectives of
    tensor ranks with matrix products only if a device starts kernels in the order of the calls.
    """
    found = {"PYTORCH_ALLOC_CONF": EXPANDABLE, "PYTORCH_NPU_ALLOC_CONF": EXPANDABLE, "TASK_QUEUE_ENABLE": TASK_QUEUE}
    found |= WATCHDOGS.get(transport, {})
    if tensor > 1:
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ:  # an older name of PYTORCH_ALLOC_CONF
        del found["PYTORCH_ALLOC_CONF"]
    return {name: value for name, value in found.items() if name not in os.environ}


def scorer_command(config: Config, stage: str, folder: Path, plane: str) -> list[str]:
    """Command line of the elastic agent that starts the ranks of [stages.NAME] on the orchestrator's node. `plane`: URL
    of the orchestrator's server."""
    ranks = config.stages[stage].ranks
    arguments = ["--folder", str(folder.resolve()), "--plane", plane, "--stage", stage]
    arguments += ["--threads", str(config.scorer_threads)]
    return python_command(AGENT, "--ranks", str(ranks), "--module", SCORER_RANK, "--", *arguments)


def scorer_environment(config: Config, stage: str) -> dict[str, str]:
    """Environment variables that are added for the agent of [stages.NAME] and its ranks; they make the ranks'
    collectives listen on loopback only. A variable that the user has set is kept."""
    names = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
    found = {"OMP_NUM_THREADS": str(config.scorer_threads)} | rank_defaults(config.stages[stage].tensor)
    return found | _on_loopback(names)


def _on_loopback(names: Sequence[str]) -> dict[str, str]:
    interface = _loopback()
    return {name: interface for name in names if name not in os.environ}


def _loopback() -> str:
    present = {name for _, name in socket.if_nameindex()}
    for name in LOOPBACKS:
        if name in present:
            return name
    raise BadInput(f"this machine has no loopback interface ({' or '.join(LOOPBACKS)}), which the trainer's ranks need")


def training_node_command(folder: Path, wait_s: float) -> list[str]:
    """Command line that runs trainer ranks on another node that shares the run folder."""
    return python_command("engine.trainer.ranks.nodes", str(folder), "--wait", str(wait_s))


def verifier_command(connection: int, memory: int, processes: int, functions: str) -> list[str]:
    """Command line of a verifier process: its end of the socket pair (a file descriptor), its limits of memory (bytes)
    and of processes that it may start (0: none), and the reward's functions (`verifier_messages.pack_functions`)."""
    return python_command("engine.verifier.worker", *map(str, (connection, memory, processes)), functions)


def store_command(queue: Queue, name: str, folder: Path) -> list[str]:
    """Command line of the process that starts TransferQueue. It writes its servers' addresses to `addresses` in the
    folder, which also holds the files of its own Ray, if it starts one. `name`: its namespace in Ray."""
    arguments = ["--name", name, "--addresses", str(folder / "addresses")]
    arguments += ["--address", queue.address] if queue.address else ["--folder", str(folder / "ray")]
    return python_command("engine.orchestrator.transferqueue", *arguments)


def conversion_command(model: str, progress: Path) -> list[str]:
    """Command line that checks the conversion of a model folder and writes its progress to a file."""
    return python_command("engine.tools.conversion", model, str(progress))


def export_command(checkpoint: Path, target: Path) -> list[str]:
    """Command line that writes the policy of a checkpoint as a Hugging Face folder."""
    return python_command("engine.trainer.export", str(checkpoint), str(target))


def timeline_command(folder: Path) -> list[str]:
    """Command line that draws the page of a run folder, timeline.html."""
    return python_command("engine.tools.watch.page", str(folder))


def instance_command(
    config: Config, model: Path, name: str, number: int, port_file: Path, port: int = 0, host: str = ""
) -> tuple[list[str], dict[str, str]]:
    """Command line of the process of one instance, which writes its address to `port_file`, and the environment
    variables that are added for it.

    `number` selects its share of rollout.devices. Port 0 means any free port, and an empty host means loopback.
    """
    start = _vllm if config.rollout.engine == "vllm" else _embedded
    command, env = start(config=config, model=model, name=name, number=number, port_file=port_file)
    command += ["--port", str(port)] if port else []
    command += ["--host", host] if host else []
    command += ["--deterministic"] if config.rollout.deterministic else []
    return command, env


def _vllm(config: Config, model: Path, name: str, number: int, port_file: Path) -> tuple[list[str], dict[str, str]]:
    from engine.run.vllm_command import instance_command_line

    return instance_command_line(config=config, model=model, name=name, number=number, port_file=port_file)


def _embedded(config: Config, model: Path, name: str, number: int, port_file: Path) -> tuple[list[str], dict[str, str]]:
    rollout = config.rollout
    cores = config.instance_cores(number)
    arguments = {
        "--model": str(model),
        "--name": name,
        "--port-file": str(port_file),
        "--slots": str(config.slots),
        "--max-context": str(rollout.max_context),
        "--threads": str(config.instance_threads),
        "--dtype": config.model.dtype,
    }
    if cores:
        arguments["--cores"] = ",".join(map(str, cores))
    given = [*(part for pair in arguments.items() for part in pair), *(["--conversations"] if rollout.program else [])]
    return python_command("engine.instance.embedded", *given), {}
