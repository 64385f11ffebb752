"""The processes of a run on a Ray cluster: an actor on each place holds one (engine.run.placed_process) and ends with
this process."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.errors import BadInput, DeadlineError, MetronomeError, clean_text
from engine.run.placed_process import ActorPlace, PlacedProcess
from engine.wire.access_token import VARIABLE as TOKEN
from tasks.cluster.ray.models import PlacedModel
from tasks.terminal.console import print_error

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
        raise DeadlineError(
            f"Ray has not started {part.name} within {wait_s:g} s (rollout.timeout_s){fetched}"
        ) from None
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
    place = part.place = first_place(part, config.rollout.timeout_s)
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
