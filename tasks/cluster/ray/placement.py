"""Places the processes of a run on a running Ray cluster: cluster.engine = "ray".

Its parts get their room at once (tasks.cluster.ray.parts): trainer nodes packed, the first of them on this machine, and
instances spread. An actor on each place holds one process (tasks.cluster.ray.parts), and a thread follows all of them
(tasks.cluster.ray.following).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import tomli_w

from engine.config import Cluster, Config
from engine.config.placing import bundles_of
from engine.errors import BadInput, DeadlineError, clean_text
from engine.run.commands import STORE_NODES
from engine.run.placed_process import FOLDER, HOST, ActorPlace
from engine.run.process import in_thread
from engine.run.vllm_command import vllm_interpreter
from engine.wire.access_token import VARIABLE as TOKEN
from engine.wire.access_token import own_token
from engine.wire.address import AUTO, bracket_host, known_address, split_address
from tasks.attempt import run_folder
from tasks.cluster.ray.following import LOOK_S, Followed, Needed, RayWatch
from tasks.cluster.ray.models import PlacedModel
from tasks.cluster.ray.parts import (
    MODEL,
    RANKS,
    Growth,
    PlacedPart,
    await_start,
    begin,
    end,
    first_place,
    give_back,
    start_actor,
    take_room,
)
from tasks.terminal.console import print_error, say

PORTS = range(20_000, 30_000)
"""Ports from which one is chosen, below those of outgoing connections."""
RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray ends a process without a word once its head is gone for so many seconds. Here that never comes: `RayWatch` ends
the run, and a checkpoint may take minutes."""
OWN_RECONNECT_S = 60.0
"""Ray's own number of them."""
SAVE_S = 120.0
"""Seconds, but at most half of those, by which a run ends before Ray's nodes do: their trainer ranks save a
checkpoint."""
ASKED_S = 60.0
"""Seconds in which a node must say whether it has vLLM."""


class Placed(NamedTuple):
    """A run whose parts have a place on other nodes."""

    config: Config
    """With the addresses at which instances and nodes meet the orchestrator."""
    await_nodes: Callable[[], Config]
    """Waits until the further trainer nodes have a place. Called before each attempt, of which it returns the config.
    Raises DeadlineError."""


@cache
def check_cluster(cluster: Cluster, device: str, engine: str) -> None:
    """Check once, before anything slow starts, that this machine is in the Ray cluster and that instances find vLLM
    there. `device`: platform.device, `engine`: rollout.engine. Raises BadInput, and prints which nodes lack vLLM where
    others have it."""
    with _connected(cluster):
        kind = _device(device)
        lacking = _without_vllm(kind) if engine == "vllm" else {}
        if lacking and all(lacking.values()):
            node, why = next(iter(lacking.items()))
            raise BadInput(f"no node of the Ray cluster with {kind} can run instances; {node}: {why}")
        for node, why in lacking.items():
            if why:
                print_error(f"warning: no instance can run on {node}: {why}")


def _without_vllm(kind: str) -> dict[str, str]:
    """For each node with devices of a kind, why it can't run vLLM; "" if it can."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = {}
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get(kind):
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            call = ray.remote(_why_no_vllm).options(num_cpus=0, scheduling_strategy=there)
            asked[f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"] = call.remote()
    if asked:
        ray.wait([*asked.values()], num_returns=len(asked), timeout=ASKED_S)
    found = {}
    for name, answer in asked.items():
        try:
            found[name] = ray.get(answer, timeout=0)
        except ray.exceptions.RayError as error:
            late = isinstance(error, ray.exceptions.GetTimeoutError)
            found[name] = f"it does not answer within {ASKED_S:g} s" if late else clean_text(str(error))
    return found


def _why_no_vllm() -> str:
    """Runs on a node."""
    try:
        vllm_interpreter()
    except BadInput as error:
        return str(error)
    return ""


@contextmanager
def running_on_ray(config: Config, folder: Path, model: Path | None = None) -> Iterator[Placed]:
    """During the body, the cluster runs the instances and, unless this is the evaluation of a `model`, the further
    trainer nodes. `folder`: that of the run, or of the evaluation, with its logs.

    Raises BadInput if Ray is not installed or not reached, DeadlineError if it has no room within cluster.wait_s,
    and MetronomeError if Ray is lost during the body (`RayWatch`).
    """
    note = (lambda error: None) if model is not None else run_folder(config).write_failure
    with _connected(config.cluster) as here, RayWatch(_needed(here), note) as watch:
        kind = _device(config.platform.device)
        config = with_addresses(config, here.host, model is None)
        wanted = bundles_of(config, kind, training=model is None)
        nodes = [_node(number, amounts, config, folder) for number, amounts in enumerate(wanted.nodes)]
        served = model or Path(config.model.path)
        held = PlacedModel.of(served, here.node, once=model is not None) if wanted.instances else None
        make = partial(_instance, config=config, model=held)
        instances = [make(number, amounts) for number, amounts in enumerate(wanted.instances)]
        parts = [*nodes, *instances]
        most = config.cluster.most_instances
        growth = Growth(
            len(instances),
            most,
            lambda number: replace(make(number, wanted.instances[0]), extra=True),
            run=config.run.name,
        )
        logs = folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with _ending(parts, growth, logs, watch):
            take_room(nodes, instances, config.cluster.wait_s, here, run=config.run.name)
            with _environment({TOKEN: own_token()}), _devices(nodes, config.cluster.wait_s):
                started = [part for part in parts if part.module]
                for part in started:
                    begin(part)
                for part in started:
                    await_start(part, config, here)
                say("cluster", f"{_told(parts)}; it took {time.monotonic() - began:.1f} s")
                places = sorted({part.place.node for part in parts if part.place is not None})
                followed = Followed(parts=parts, config=config, logs=logs, here=here, growth=growth, watch=watch)
                with _environment({STORE_NODES: ",".join(places)}), followed:
                    yield Placed(config, followed.await_nodes)


def _needed(here: ActorPlace) -> list[Needed]:
    """What `RayWatch` looks at: the head, and the node of this machine."""
    import ray

    (own,) = [node for node in ray.nodes() if node["NodeID"] == here.node]
    return [
        Needed("Ray's head", ray.get_runtime_context().gcs_address, _head_responds, _head_is_awaited_s(here)),
        Needed("Ray's node on this machine", f"{bracket_host(own['NodeManagerAddress'])}:{own['NodeManagerPort']}"),
    ]


def _head_responds() -> bool:
    import ray

    try:
        ray._private.worker.global_worker.gcs_client.check_alive([], timeout=LOOK_S)
    except ray.exceptions.RayError:
        return False
    return True


def _head_is_awaited_s(here: ActorPlace) -> float:
    """Seconds for which a run goes on without a head, less than for which Ray's nodes do; 0 if what the head knows is
    gone with it. Raises DeadlineError."""
    import ray
    from ray.experimental.internal_kv import _internal_kv_get
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # the head writes this in any case; a report of usage would have it
    if _internal_kv_get(b"extra_usage_tag_gcs_storage", namespace=b"usage_stats") in (None, b"memory"):
        return 0.0
    there = NodeAffinitySchedulingStrategy(here.node, soft=False)
    call = ray.remote(_reconnect_s).options(num_cpus=0, scheduling_strategy=there)
    try:
        nodes_s = float(ray.get(call.remote(), timeout=ASKED_S))
    except ray.exceptions.GetTimeoutError:
        raise DeadlineError(f"Ray's node on this machine does not answer within {ASKED_S:g} s") from None
    return nodes_s - min(SAVE_S, nodes_s / 2)


def _reconnect_s() -> float:
    """Runs on a node, in its environment."""
    return float(os.environ.get(RECONNECT, OWN_RECONNECT_S))


@contextmanager
def _ending(parts: Sequence[PlacedPart], growth: Growth, logs: Path, watch: RayWatch) -> Iterator[None]:
    """At the end of the body, end the parts' processes and actors, and give their room back. If Ray is lost, before or
    meanwhile, nobody is there to take it, and who asks would wait."""

    def unless_lost(work: Callable[[], None]) -> None:
        if watch.lost:
            return
        asked = in_thread("end", work)
        while not watch.lost and not wait([asked], 0.5).done:
            pass
        if asked.done():
            asked.result()

    with ExitStack() as stack:  # what fails keeps nothing that follows from its end
        stack.callback(unless_lost, partial(give_back, parts))
        stack.callback(end, parts, logs)
        stack.callback(unless_lost, growth.stop)
        yield


@contextmanager
def _connected(cluster: Cluster) -> Iterator[ActorPlace]:
    """Join the cluster during the body. Yields this machine's place in it."""
    os.environ[RECONNECT] = "1000000"  # KubeRay sets that of the nodes for whoever runs there
    try:
        import ray
    except ImportError:
        raise BadInput(f'cluster.engine = "ray" needs Ray: pip install "metronome[ray]" into {sys.prefix}') from None
    # Ray has no switch for what it prints of nodes that die: the last lines of their raylets' logs
    ray._private.worker.print_to_stdstream = lambda data, ignore_prefix: None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if cluster.address != "auto":  # Ray would try for minutes, whatever signals come
            socket.create_connection(split_address(cluster.address, "cluster.address"), timeout=5.0).close()
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:  # RayError: no token where one is set
        raise BadInput(
            f"cluster.address = {cluster.address!r}: this machine is in no such Ray cluster: {clean_text(str(error))} "
            "(`ray start --head`, or `ray start --address HEAD:PORT` on each further node)"
        ) from None
    try:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray puts its own there
                signal.signal(number, handler)
        context = ray.get_runtime_context()
        yield ActorPlace(context.get_node_id(), ray.util.get_node_ip_address(), {}, os.nice(0))
    finally:
        ray.shutdown()


def _device(device: str) -> str:
    """Ray's name of the resource that trainer ranks and vLLM instances take. `device`: platform.device."""
    import ray

    known = {"npu": "NPU", "cuda": "GPU", "cpu": "CPU"}
    there = ray.cluster_resources()
    return known.get(device) or next((one for one in ("NPU", "GPU") if there.get(one)), "CPU")


def _node(number: int, amounts: Mapping[str, float], config: Config, folder: Path) -> PlacedPart:
    if number == 0:
        return PlacedPart("trainer node 0", amounts)
    arguments = [str(folder.resolve()), "--wait", str(_patience(config))]
    return PlacedPart(f"trainer node {number}", amounts, module=RANKS, arguments=arguments)


def _patience(config: Config) -> float:
    """Seconds that a process waits for the orchestrator, which may itself wait for room and then load its models."""
    return config.cluster.wait_s + config.rollout.timeout_s


def _instance(number: int, amounts: Mapping[str, float], config: Config, model: PlacedModel | None) -> PlacedPart:
    """An instance that joins under the address in rollout.listen, so it needs no file of this machine but the model,
    which its node fetches."""
    listen = known_address(config.rollout.listen, "rollout.listen")
    rollout = config.rollout.model_copy(update={"wait_s": max(config.rollout.wait_s, _patience(config))})
    config = config.model_copy(update={"rollout": rollout})
    arguments = ["serve", f"{FOLDER}/config.toml", "--join", listen, "--host", HOST]
    arguments += ["--set", f"model.path={MODEL}"]
    files = {"config.toml": tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))}
    return PlacedPart(f"instance-{number}", amounts, module="flows.cli", arguments=arguments, files=files, model=model)


def with_addresses(config: Config, host: str, training: bool) -> Config:
    """The config with addresses of this machine, which all nodes reach: those of the recipe if they can be had."""
    listen = _own_address("rollout.listen", config.rollout.listen, host, ports=1)
    rollout = config.rollout.model_copy(update={"listen": listen})
    parallel = config.parallel
    if training and parallel.nodes > 1:
        rendezvous = _own_address("parallel.rendezvous", parallel.rendezvous, host, ports=2)
        parallel = parallel.model_copy(update={"rendezvous": rendezvous})
    return config.model_copy(update={"rollout": rollout, "parallel": parallel})


def _own_address(key: str, given: str, host: str, ports: int) -> str:
    """`given` if it names an address of this machine, other than loopback, and a free port, as the next ones are if
    there must be several `ports`; else `host` and such a port. "auto" is `host`."""
    given = given.replace(f"{AUTO}:", f"{bracket_host(host)}:")
    named, port = split_address(given, key)
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(named)
        if port and not address.startswith(("127.", "0.")) and _are_free(address, port, ports):
            return given
    found = next((one for one in random.sample(PORTS, 100) if _are_free(host, one, ports)), None)
    if found is None:
        raise DeadlineError(f"{key}: 100 ports of {host} from {PORTS.start} on tried, and none was free")
    say("cluster", f"{key} is {bracket_host(host)}:{found}, where the other nodes reach this one")
    return f"{bracket_host(host)}:{found}"


def _are_free(host: str, port: int, ports: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        for more in range(ports):
            socket.create_server((host, port + more), family=family).close()
    except OSError:
        return False
    return True


def _told(parts: Sequence[PlacedPart]) -> str:
    """Where everything is."""
    by_node: dict[str, list[str]] = {}
    for part in parts:
        where = f"{part.place.host} ({part.place.node[:6]})" if part.place is not None else "?"
        by_node.setdefault(where, []).append(part.name)
    return "; ".join(f"{', '.join(names)} on {where}" for where, names in by_node.items())


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """During the body, this process and its children have these variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ |= values
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _devices(nodes: Sequence[PlacedPart], wait_s: float) -> Iterator[None]:
    """During the body, this process and its children see the devices that Ray has given the first trainer node. Raises
    the errors of `first_place`."""
    if not nodes:
        yield
        return
    first = nodes[0]
    first.actor = start_actor(first)
    first.answer = first.actor.place.remote()
    first.place = first_place(first, wait_s)
    first.answer = None
    with _environment(first.place.devices):
        yield
