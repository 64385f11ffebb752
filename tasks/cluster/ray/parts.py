"""The processes of a run on a Ray cluster, and their room: placement groups, of which a run has all or none.

An actor on each place holds one process (engine.run.placed_process) and ends with this process."""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from engine.config import Config
from engine.errors import BadInput, DeadlineError, MetronomeError, clean_text
from engine.run.placed_process import ActorPlace, PlacedProcess
from engine.run.process import in_thread
from engine.wire.access_token import VARIABLE as TOKEN
from tasks.cluster.ray.models import PlacedModel
from tasks.terminal.console import print_error, say

MODEL = "{model}"
"""Stands in the arguments for the folder with the model on the node."""
RANKS = "engine.trainer.ranks.nodes"
"""Module of a further trainer node."""
STOP_S = 8.0
"""Seconds that a process has to end before it is killed."""


@dataclass(eq=False)
class PlacedPart:
    """A process of the run, through all its starts. `module`, `arguments`, `files`: as in `PlacedProcess.start`."""

    name: str
    amounts: Mapping[str, float]
    module: str = ""
    """Empty: it starts nothing and only holds its devices."""
    arguments: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    model: PlacedModel | None = None
    """What its node must have; its place there replaces MODEL in `arguments`."""
    extra: bool = False
    """Whether it is an instance above the number with which the run began."""
    group: Any = None
    bundle: int = 0
    """Number of its bundle in its group."""
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
    refused: str = ""
    """Why it is not started again."""

    @property
    def stage(self) -> str:
        """Name under which the console tells of it."""
        return "instances" if self.files else "cluster"


class _Held(PlacedProcess):
    """The actor. It asks Ray where it is."""

    def __init__(self) -> None:
        import ray

        super().__init__(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())
        self._models = ExitStack()
        """Holds the model until this actor ends."""

    def start_with(
        self,
        model: PlacedModel,
        module: str,
        arguments: Sequence[str],
        files: Mapping[str, str],
        environment: Mapping[str, str],
    ) -> ActorPlace:
        """As `start`, once this node has the model."""
        place, held = model.hold(self.place().node)
        self._models.enter_context(held)
        return self.start(module, [one.replace(MODEL, str(place)) for one in arguments], files, environment)


def start_actor(part: PlacedPart) -> Any:  # noqa: ANN401
    """An actor on the place of a part."""
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


def begin(part: PlacedPart) -> None:
    """Start the actor of a part, and have it start the process. Ray waits for room where the bundle's node died."""
    part.actor = start_actor(part)
    part.starts += 1
    part.began = time.monotonic()
    part.again = 0.0
    part.place = None
    arguments = list(part.arguments)
    if part.files:
        arguments += ["--name", f"{part.name}-{part.starts - 1}" if part.starts > 1 else part.name]
    environment = {name: os.environ[name] for name in (TOKEN, "PYTHONPATH") if name in os.environ}
    given = (part.module, arguments, dict(part.files), environment)
    if part.model is None:
        part.answer = part.actor.start.remote(*given)
    else:
        part.answer = part.actor.start_with.remote(part.model, *given)


def first_place(part: PlacedPart, wait_s: float) -> ActorPlace:
    """Wait for the place of a part whose actor was asked for it. Raises BadInput if its node lacks Metronome, and
    DeadlineError after `wait_s`, or if its node has waited in vain for the model."""
    import ray

    try:
        place: ActorPlace = ray.get(part.answer, timeout=wait_s)
    except ray.exceptions.GetTimeoutError:
        fetched = ", which includes the time to fetch the model" if part.model is not None else ""
        raise DeadlineError(f"Ray has not started {part.name} within {wait_s:g} s (cluster.wait_s){fetched}") from None
    except ray.exceptions.RayError as error:
        raised = raised_there(error)
        known = isinstance(raised, (MetronomeError, OSError))
        kind = DeadlineError if isinstance(raised, DeadlineError) else BadInput
        raise kind(f"Ray can't start {part.name}: {clean_text(str(raised if known else error))}") from None
    return place


def raised_there(error: Exception) -> Exception | None:
    """What the code of an actor has raised, by Ray's error; None if Ray has lost the actor."""
    found = getattr(error, "cause", None)
    return found if isinstance(found, Exception) else None


def await_start(part: PlacedPart, config: Config, here: ActorPlace) -> None:
    """Wait until a process has been started. Raises the errors of `first_place`, and BadInput if weights can't get to
    it."""
    place = part.place = first_place(part, config.cluster.wait_s)
    part.answer = part.actor.look.remote()
    if place.niceness > here.niceness:
        print_error(
            f"warning: Ray runs {part.name} on {place.host} with niceness {place.niceness}; set RAY_worker_niceness=0 "
            "where you call ray start"
        )
    if why := out_of_reach(part, place, config, here):
        raise BadInput(why)


def out_of_reach(part: PlacedPart, place: ActorPlace, config: Config, here: ActorPlace) -> str:
    """Why weights can't get to an instance at a place; "" if they can."""
    far = place.host != here.host and config.weights.transport == "file" and config.parallel.nodes == 1
    if not part.files or not far:
        return ""
    return f'weights.transport = "file" does not reach {part.name} on {place.host}: set it to "gloo", "nccl" or "hccl"'


def end(parts: Sequence[PlacedPart], logs: Path, grace_s: float = STOP_S) -> None:
    """End processes and their actors, after `grace_s` seconds by force. Their last output goes to the logs, or is lost
    where they can't be written."""
    import ray

    asked = {part: part.actor.stop.remote(grace_s) for part in parts if part.actor is not None}
    if asked:
        ray.wait([*asked.values()], num_returns=len(asked), timeout=grace_s + 2.0)
    for part, answer in asked.items():
        try:
            if ray.wait([answer], timeout=0)[0]:
                write_log(part, ray.get(answer), logs)
        except ray.exceptions.RayError:  # its node is gone, and its output with it
            pass
        except OSError as error:
            print_error(f"warning: {log_of(part, logs)} can't be written: {error}")
        kill(part)


def kill(part: PlacedPart) -> None:
    """Kill the actor of a part, and the process with it. The part keeps its room. It counts as dead even if Ray can't
    kill it: what Ray does not reach ends with its node, or with this run."""
    import ray

    if part.actor is not None:
        try:
            ray.kill(part.actor)
        except Exception as error:  # who asks has other parts to look after
            print_error(f"warning: Ray can't end {part.name}: {type(error).__name__}: {clean_text(str(error))}")
    part.actor = None
    part.answer = None
    part.place = None


def write_log(part: PlacedPart, printed: bytes, logs: Path) -> None:
    """Append what a part has printed to its log. Raises OSError."""
    if part.module:
        with log_of(part, logs).open("ab") as file:
            file.write(printed)


def log_of(part: PlacedPart, logs: Path) -> Path:
    """The log of a part in a folder."""
    return logs / f"{part.name.replace(' ', '-')}.log"


T = TypeVar("T")

NODE_ID = "ray.io/node-id"
"""Ray's label of a node with its id."""
HOLD_S = 10.0
"""Seconds for which a run holds a part of its room while the rest is taken. Then it gives all back, because another run
may have the rest and wait for this one's. Chance lengthens them, so that two such runs do not meet again."""
BACK_S = 2.0
"""Seconds until it asks again, in the mean."""
SAY_S = 30.0
"""Seconds between two lines that say for what the run waits."""
POLL_S = 0.2
"""Seconds between two questions whether a group has room."""
HEAD_S = 1800.0
"""Seconds in which Ray's head must answer. One that is gone or stands still, and does not come back, is noticed before
(`tasks.cluster.ray.following.RayWatch`)."""


def take_room(
    nodes: Sequence[PlacedPart], instances: Sequence[PlacedPart], wait_s: float, here: ActorPlace, run: str
) -> None:
    """Take the room of all parts at once: trainer nodes packed, with the first of them `here`, and instances spread.
    `run`: name under which other runs see who has it.

    Raises DeadlineError after `wait_s` seconds.
    """
    deadline = time.monotonic() + wait_s
    told = time.monotonic()
    while True:
        asked = [parts for parts in (nodes, instances) if parts]
        if nodes:
            ask_for_room(nodes, "PACK", run, selector=[{NODE_ID: here.node}, *({} for _ in nodes[1:])])
        if instances:
            ask_for_room(instances, "SPREAD", run)
        held = float("inf")
        """Monotonic time at which a part of the room is given back."""
        while missing := [parts for parts in asked if not has_room(parts[0])]:
            now = time.monotonic()
            if len(missing) == len(asked):
                held = float("inf")
            elif held == float("inf"):
                held = now + HOLD_S * random.uniform(1.0, 2.0)
            if now > min(deadline, held):
                break
            if now - told > SAY_S:
                told = now
                why = _lacking(missing, asked, here)
                say("cluster", f"{why}; the run waits for up to {wait_s:g} s (cluster.wait_s)")
            time.sleep(POLL_S)
        else:
            return
        lacking = _lacking(missing, asked, here)
        give_back([part for parts in asked for part in parts])
        if time.monotonic() > deadline:
            raise DeadlineError(f"{lacking}; waited {wait_s:g} s (cluster.wait_s)")
        time.sleep(BACK_S * random.uniform(0.5, 1.5))


def ask_for_room(
    parts: Sequence[PlacedPart], strategy: str, run: str, selector: list[dict[str, str]] | None = None
) -> None:
    """Ask Ray for a group with a bundle for each part. `selector`: the labels of each bundle's node."""
    from ray.util.placement_group import placement_group

    amounts = [dict(part.amounts) for part in parts]
    name = f"{run}/{uuid.uuid4().hex}"  # Ray wants each name once
    group = _answer(lambda: placement_group(amounts, strategy=strategy, name=name, bundle_label_selector=selector))
    for bundle, part in enumerate(parts):
        part.group = group
        part.bundle = bundle


def has_room(part: PlacedPart) -> bool:
    """Whether Ray has placed the group of a part."""
    from ray.util.placement_group import placement_group_table

    return bool(_answer(lambda: placement_group_table(part.group))["state"] == "CREATED")


def _answer(question: Callable[[], T]) -> T:
    """What Ray's head answers. Ray would wait for a head that is gone without an end, and hear no signal: a thread
    waits, so that this one can be ended. Raises DeadlineError after HEAD_S."""
    asked = in_thread("question", question)
    if not wait([asked], HEAD_S).done:
        raise DeadlineError(f"Ray's head has not answered within {HEAD_S:g} s")
    return asked.result()


def give_back(parts: Sequence[PlacedPart]) -> None:
    """Give the room of parts back, also what they still wait for."""
    from ray.util.placement_group import remove_placement_group

    groups: dict[Any, Any] = {part.group.id: part.group for part in parts if part.group is not None}
    for group in groups.values():
        _answer(partial(remove_placement_group, group))
    for part in parts:
        part.group = None


class Growth:
    """Instances above the number with which a run began, for as long as the cluster has room for them. There is at most
    one request for room at a time."""

    def __init__(self, instances: int, most: int, make: Callable[[int], PlacedPart], run: str) -> None:
        """`instances`: their number at the start; `most`: up to this number; `make`: an instance by its number, no two
        of which are the same; `run`: as in `take_room`."""
        self._run = run
        self.losses = 0
        """Number of such instances that were lost since one had started."""
        self._again = 0.0
        """Monotonic time before which no room is asked for."""
        self._most = most
        self._there = instances
        self._number = instances
        self._make = make
        self._asked: PlacedPart | None = None

    def grown(self) -> PlacedPart | None:
        """The next instance if there is room for it."""
        if self._asked is None and self._there < self._most and time.monotonic() >= self._again:
            self._asked = self._make(self._number)
            ask_for_room([self._asked], "SPREAD", self._run)
        if self._asked is None or not has_room(self._asked):
            return None
        found, self._asked = self._asked, None
        self._number += 1
        self._there += 1
        return found

    def drop(self, part: PlacedPart, again: float = 0.0) -> None:
        """Give the room of such an instance back. `again`: monotonic time from which on another one may be asked
        for."""
        give_back([part])
        self._again = again
        self._there -= 1

    def withdraw(self) -> None:
        """Want no room for now."""
        if self._asked is not None:
            give_back([self._asked])
            self._asked = None

    def stop(self) -> None:
        """Want no further instances."""
        self._most = 0
        self.withdraw()


def _lacking(missing: Sequence[Sequence[PlacedPart]], asked: Sequence[Sequence[PlacedPart]], here: ActorPlace) -> str:
    import ray

    parts = [part for group in missing for part in group]
    wants = ", ".join(f"{part.name} ({describe_amounts(part.amounts)})" for part in parts)
    first = parts[0]
    bound = f"; {first.name} must be on this machine ({here.host})" if not first.module else ""
    free = describe_amounts(_answer(ray.available_resources)) or "no devices"
    holders = _holders({parts[0].group.id for parts in asked})
    held = f"; room is held by {', '.join(holders)}" if holders else ""
    return f"Ray has no room for {wants}{bound}; free are {free}{held}"


def _holders(own: Set[Any]) -> list[str]:
    """The runs with room on the cluster. `own`: ids of the groups of the run that asks, of which it may have a part."""
    from ray.util.placement_group import placement_group_table

    mine = {one.hex() for one in own}
    groups = [group for identity, group in _answer(placement_group_table).items() if identity not in mine]
    names = {group["name"].rpartition("/")[0] for group in groups if group["state"] == "CREATED"}
    return sorted(names - {""})


def describe_amounts(amounts: Mapping[str, float]) -> str:
    """Amounts of resources for people: "8 NPU"."""
    return ", ".join(f"{amounts[one]:g} {one}" for one in ("NPU", "GPU", "CPU") if amounts.get(one))
