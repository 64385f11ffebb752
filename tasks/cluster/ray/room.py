"""Room on a Ray cluster for the parts of a run: placement groups, of which a run has all or none."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import wait
from functools import partial
from typing import Any, TypeVar

from engine.errors import DeadlineError
from engine.run.placed_process import ActorPlace
from engine.run.process import in_thread
from tasks.cluster.ray.parts import PlacedPart
from tasks.terminal.console import say

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
                say("cluster", f"{why}; the run waits for up to {wait_s:g} s (rollout.timeout_s)")
            time.sleep(POLL_S)
        else:
            return
        lacking = _lacking(missing, asked, here)
        give_back([part for parts in asked for part in parts])
        if time.monotonic() > deadline:
            raise DeadlineError(f"{lacking}; waited {wait_s:g} s (rollout.timeout_s)")
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
