"""Places the processes of a run on a running Ray cluster: cluster.engine = "ray".

Two placement groups take the room of a run at once: trainer nodes packed, the first of them on this machine, and
instances spread. An actor on each place holds one process (engine.run.placed_process) and ends with this process. A
thread follows all of them: it copies their logs into the run folder, and starts again what has died.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from engine.config import Cluster, Config
from engine.config.placing import bundles_of
from engine.errors import BadInput, DeadlineError, clean_text
from engine.run.instance_process import REFILL_S
from engine.run.placed_process import FOLDER, HOST, ActorPlace, News, PlacedProcess
from engine.run.process import BAD_INPUT
from engine.wire.access_token import VARIABLE as TOKEN
from engine.wire.access_token import own_token
from engine.wire.address import bracket_host, split_address
from tasks.console import print_error, say

LOOK_S = 0.5
"""Seconds between two looks at the processes."""
BACKOFF_S = 1.0
"""Seconds before a process that ended is started again; each further time doubles them."""
LONGEST_BACKOFF_S = 60.0
"""Most of these seconds where a node that has room can't start it, as one without Metronome."""
SAY_S = 30.0
"""Seconds between two lines that say for whom the run waits."""
STOP_S = 8.0
"""Seconds that a process has to end before it is killed."""
PORTS = range(20_000, 30_000)
"""Ports from which one is chosen, below those of outgoing connections."""
NODE_ID = "ray.io/node-id"
"""Ray's label of a node with its id."""


@dataclass(eq=False)
class _Part:
    """A process of the run, through all its starts. `module`, `arguments`, `files`: as in `PlacedProcess.start`."""

    name: str
    bundle: int
    """Number of its bundle in its group."""
    amounts: Mapping[str, float]
    module: str = ""
    """Empty: it starts nothing and only holds its devices."""
    arguments: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    group: Any = None
    actor: Any = None
    answer: Any = None
    """What the actor has been asked; None once it is not looked at any more."""
    place: ActorPlace | None = None
    """Where it runs; None while it has no place."""
    again: float = 0.0
    """Monotonic time from which on it may be started, 0 if it has been."""
    starts: int = 0
    began: float = 0.0
    """Monotonic time of the last start."""
    faults: int = 0
    """Number of times that it ended by itself since it last ran for REFILL_S."""
    losses: int = 0
    """Number of times in a row that its actor was lost before it answered."""


@dataclass(frozen=True)
class PlacedRun:
    """A run whose parts have room on the cluster."""

    config: Config
    """With the addresses at which instances and nodes meet the orchestrator."""
    _parts: list[_Part]

    def await_nodes(self) -> None:
        """Wait until each further trainer node has a place. Raises DeadlineError that names those without one."""
        deadline = time.monotonic() + self.config.cluster.wait_s
        told = 0.0
        while missing := [part.name for part in self._parts if part.place is None and part.module == RANKS]:
            what = f"Ray has not started {', '.join(missing)} again"
            if time.monotonic() > deadline:
                raise DeadlineError(f"{what} within {self.config.cluster.wait_s:g} s (cluster.wait_s)")
            if time.monotonic() - told > SAY_S:
                told = time.monotonic()
                say("cluster", f"{what}; the run waits for up to {self.config.cluster.wait_s:g} s (cluster.wait_s)")
            time.sleep(LOOK_S)


RANKS = "engine.ranks.nodes"
"""Module of a further trainer node."""


@contextmanager
def running_on_ray(config: Config, folder: Path, model: Path | None = None) -> Iterator[PlacedRun]:
    """During the body, the cluster runs the instances and, unless this is the evaluation of a `model`, the further
    trainer nodes. `folder`: that of the run, or of the evaluation, with its logs.

    Raises BadInput if Ray is not installed or not reached, and DeadlineError if it has no room within cluster.wait_s.
    """
    with _connected(config.cluster) as here:
        kind = _device(config)
        config = _with_addresses(config, here.host, model is None)
        wanted = bundles_of(config, kind, training=model is None)
        nodes = [_node(number, amounts, config, folder) for number, amounts in enumerate(wanted.nodes)]
        instances = [_instance(number, amounts, config, model) for number, amounts in enumerate(wanted.instances)]
        parts = [*nodes, *instances]
        began = time.monotonic()
        with _ending(parts):
            _take_room(nodes, "PACK", config.cluster.wait_s, here)
            _take_room(instances, "SPREAD", config.cluster.wait_s, None)
            with _token(), _devices(nodes, config.cluster.wait_s):
                started = [part for part in parts if part.module]
                for part in started:
                    _begin(part)
                for part in started:
                    _await_start(part, config, here)
                say("cluster", f"{_told(parts)}; it took {time.monotonic() - began:.1f} s")
                with _followed(parts, config, folder / "logs"):
                    yield PlacedRun(config, parts)


@contextmanager
def _ending(parts: Sequence[_Part]) -> Iterator[None]:
    """At the end of the body, end the parts' processes and actors, and give their room back."""
    import ray
    from ray.util.placement_group import remove_placement_group

    try:
        yield
    finally:
        asked = [part.actor.stop.remote(STOP_S) for part in parts if part.actor is not None]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=STOP_S + 2.0)
        for part in parts:
            if part.actor is not None:
                ray.kill(part.actor)
        for group in {part.group.id: part.group for part in parts if part.group is not None}.values():
            remove_placement_group(group)


@contextmanager
def _connected(cluster: Cluster) -> Iterator[ActorPlace]:
    """Join the cluster during the body. Yields this machine's place in it."""
    try:
        import ray
    except ImportError:
        raise BadInput(f'cluster.engine = "ray" needs Ray: pip install "metronome[ray]" into {sys.prefix}') from None
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


def _device(config: Config) -> str:
    """Ray's name of the resource that trainer ranks and vLLM instances take."""
    import ray

    known = {"npu": "NPU", "cuda": "GPU", "cpu": "CPU"}
    there = ray.cluster_resources()
    return known.get(config.platform.device) or next((one for one in ("NPU", "GPU") if there.get(one)), "CPU")


def _node(number: int, amounts: Mapping[str, float], config: Config, folder: Path) -> _Part:
    if number == 0:
        return _Part("trainer node 0", 0, amounts)
    arguments = [str(folder.resolve()), "--wait", str(_patience(config))]
    return _Part(f"trainer node {number}", number, amounts, module=RANKS, arguments=arguments)


def _patience(config: Config) -> float:
    """Seconds that a process waits for the orchestrator, which may itself wait for room and then load its models."""
    return config.cluster.wait_s + config.rollout.timeout_s


def _instance(number: int, amounts: Mapping[str, float], config: Config, model: Path | None) -> _Part:
    """An instance that joins under the address in rollout.listen, so it needs no file of the run folder but the
    model."""
    if model is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model.resolve())})})
    host, port = split_address(config.rollout.listen, "rollout.listen")
    rollout = config.rollout.model_copy(update={"wait_s": max(config.rollout.wait_s, _patience(config))})
    config = config.model_copy(update={"rollout": rollout})
    arguments = ["serve", f"{FOLDER}/config.toml", "--join", f"{bracket_host(host)}:{port}", "--host", HOST]
    files = {"config.toml": tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))}
    return _Part(f"instance-{number}", number, amounts, module="flows.cli", arguments=arguments, files=files)


def _with_addresses(config: Config, host: str, training: bool) -> Config:
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
    there must be several `ports`; else `host` and such a port."""
    if given != "auto":
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
    return all(_is_free(host, port + more) for more in range(ports))


def _is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        return False
    return True


def _take_room(parts: Sequence[_Part], strategy: str, wait_s: float, first: ActorPlace | None) -> None:
    """Take the room of the parts at once. `first`: where the first one must be. Raises DeadlineError."""
    if not parts:
        return
    import ray
    from ray.util.placement_group import placement_group

    selector = [{NODE_ID: first.node}, *({} for _ in parts[1:])] if first is not None else None
    group = placement_group([dict(part.amounts) for part in parts], strategy=strategy, bundle_label_selector=selector)
    for part in parts:
        part.group = group
    deadline = time.monotonic() + wait_s
    while not group.wait(min(SAY_S, max(0.0, deadline - time.monotonic()))):
        wants = f"{', '.join(f'{part.name} ({_amounts(part.amounts)})' for part in parts)}"
        here = f"; {parts[0].name} must be on this machine ({first.host})" if first is not None else ""
        what = f"Ray has no room for {wants}{here}; free are {_amounts(ray.available_resources()) or 'no devices'}"
        if time.monotonic() > deadline:
            raise DeadlineError(f"{what}; waited {wait_s:g} s (cluster.wait_s)")
        say("cluster", f"{what}; the run waits for up to {wait_s:g} s (cluster.wait_s)")


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amounts[one]:g} {one}" for one in ("NPU", "GPU", "CPU") if amounts.get(one))


def _begin(part: _Part) -> None:
    """Start the actor of a part, and have it start the process. Ray waits for room where the bundle's node died."""
    part.actor = _actor(part)
    part.starts += 1
    part.began = time.monotonic()
    part.again = 0.0
    part.place = None
    arguments = list(part.arguments)
    if part.files:
        arguments += ["--name", f"{part.name}-{part.starts - 1}" if part.starts > 1 else part.name]
    environment = {name: os.environ[name] for name in (TOKEN, "PYTHONPATH") if name in os.environ}
    part.answer = part.actor.start.remote(part.module, arguments, dict(part.files), environment)


def _actor(part: _Part) -> Any:  # noqa: ANN401
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    amounts = dict(part.amounts)
    kind = ray.remote(_Held).options(
        num_cpus=amounts.pop("CPU", 0),
        num_gpus=amounts.pop("GPU", 0),
        resources=amounts,
        scheduling_strategy=PlacementGroupSchedulingStrategy(part.group, part.bundle),
    )
    return kind.remote()


class _Held(PlacedProcess):
    """The actor. It asks Ray where it is."""

    def __init__(self) -> None:
        import ray

        super().__init__(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())


def _first_place(part: _Part, wait_s: float) -> ActorPlace:
    """Wait for the place of a part whose actor was asked for it. Raises BadInput if its node lacks Metronome, and
    DeadlineError after `wait_s`."""
    import ray

    try:
        place: ActorPlace = ray.get(part.answer, timeout=wait_s)
    except ray.exceptions.GetTimeoutError:
        raise DeadlineError(f"Ray has not started {part.name} within {wait_s:g} s (cluster.wait_s)") from None
    except ray.exceptions.RayError as error:
        raise BadInput(f"Ray can't start {part.name}: {clean_text(str(error))}") from None
    return place


def _await_start(part: _Part, config: Config, here: ActorPlace) -> None:
    """Wait until a process has been started. Raises the errors of `_first_place`, and BadInput if weights can't get to
    it."""
    place = part.place = _first_place(part, config.cluster.wait_s)
    part.answer = part.actor.look.remote()
    if place.niceness > here.niceness:
        print_error(
            f"warning: Ray runs {part.name} on {place.host} with niceness {place.niceness}; set RAY_worker_niceness=0 "
            "where you call ray start"
        )
    if part.files and config.weights.transport == "file" and config.parallel.nodes == 1 and place.host != here.host:
        raise BadInput(
            f'weights.transport = "file" does not reach {part.name} on {place.host}: set it to "gloo", "nccl" or "hccl"'
        )


def _told(parts: Sequence[_Part]) -> str:
    """Where everything is."""
    import ray

    hosts = {node["NodeID"]: f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})" for node in ray.nodes()}
    by_node: dict[str, list[str]] = {}
    for part in parts:
        node = part.place.node if part.place is not None else "?"
        by_node.setdefault(node, []).append(part.name)
    return "; ".join(f"{', '.join(names)} on {hosts.get(node, node)}" for node, names in by_node.items())


@contextmanager
def _token() -> Iterator[None]:
    """During the body, this process and its children have an access token."""
    given = os.environ.get(TOKEN)
    os.environ[TOKEN] = own_token()
    try:
        yield
    finally:
        if given is None:
            del os.environ[TOKEN]
        else:
            os.environ[TOKEN] = given


@contextmanager
def _devices(nodes: Sequence[_Part], wait_s: float) -> Iterator[None]:
    """During the body, this process and its children see the devices that Ray has given the first trainer node. Raises
    the errors of `_first_place`."""
    if not nodes:
        yield
        return
    first = nodes[0]
    first.actor = _actor(first)
    first.answer = first.actor.place.remote()
    first.place = _first_place(first, wait_s)
    first.answer = None
    before = {name: os.environ.get(name) for name in first.place.devices}
    os.environ |= first.place.devices
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _followed(parts: Sequence[_Part], config: Config, logs: Path) -> Iterator[None]:
    """During the body, a thread follows the processes."""
    ended = threading.Event()
    logs.mkdir(parents=True, exist_ok=True)

    def follow() -> None:
        while not ended.wait(LOOK_S):
            for part in parts:
                if ended.is_set():
                    return
                _look_at(part, config.rollout.restarts if part.files else config.run.resumes, logs)

    thread = threading.Thread(target=follow, name="cluster", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(STOP_S)


def _look_at(part: _Part, restarts: int, logs: Path) -> None:
    import ray

    if part.again and time.monotonic() > part.again:
        _begin(part)
    if part.answer is None or not ray.wait([part.answer], timeout=0)[0]:
        return
    try:
        news = ray.get(part.answer)
    except ray.exceptions.RayError as error:
        reason = clean_text(str(error)).partition("\n")[0]
        lost = f"{part.name} is lost with its node, and starts again where there is room: {reason}"
        say("instances" if part.files else "cluster", lost)
        ray.kill(part.actor)  # it may still live where this machine does not reach it
        part.place = None
        part.answer = None
        part.again = time.monotonic() + min(LONGEST_BACKOFF_S, BACKOFF_S * 2**part.losses)
        part.losses += 1
        return
    if isinstance(news, ActorPlace):
        part.place = news
        part.losses = 0
        say("cluster", f"{part.name} starts on {news.host} ({news.node[:6]})")
    elif _has_ended(part, news, restarts, logs):
        return
    part.answer = part.actor.look.remote()


def _has_ended(part: _Part, news: News, restarts: int, logs: Path) -> bool:
    """Append what a process has printed to its log. If it has ended, decide whether it starts again."""
    log = logs / f"{part.name.replace(' ', '-')}.log"
    with log.open("ab") as file:
        file.write(news.log)
    if news.code is None:
        return False
    import ray

    part.answer = None
    if news.code == 0:
        return True
    part.faults = 1 if time.monotonic() - part.began > REFILL_S else part.faults + 1
    lasting = news.code == BAD_INPUT or part.faults > restarts
    then = "is not started again" if lasting else "starts again"
    say("instances" if part.files else "cluster", f"{part.name} ended with {news.code} and {then}; its log: {log}")
    if not lasting:
        part.again = time.monotonic() + BACKOFF_S * 2**part.faults
        ray.kill(part.actor)
        part.place = None
    return True
