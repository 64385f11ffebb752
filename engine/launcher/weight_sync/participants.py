"""The instances that take part in one weight sync: acted on together, and left out when they fail."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Protocol
from urllib.parse import urlsplit

from engine.errors import BadInput, MetronomeError, WeightSyncError
from engine.launcher.pool.instance import Instance
from engine.launcher.pool.instance_client import InstanceFault, Refused

STRIKES = 2
"""An instance that fails so many transfers in a row while others live is left out."""

FATAL = (Refused, WeightSyncError, BadInput)
"""Not the end of an instance: what was sent, or what it makes of it, is wrong."""


class SyncPool(Protocol):
    """What is asked of the pool."""

    def members(self) -> list[Instance]:
        """Those that must get the next version."""

    async def wait_for_member(self) -> None:
        """Until there is one; raises when the pool gives up."""

    def exclude(self, instance: Instance, reason: str) -> None:
        """It failed: no prompts until it was brought to the weights again."""

    def admit(self, instance: Instance) -> None:
        """It holds the current weights."""


class Participants:
    """The members of the sync under way."""

    def __init__(self, pool: SyncPool) -> None:
        self._pool = pool
        self.members: list[Instance] = []
        self.connected: list[Instance] = []
        """The members of the last generation's groups; empty once one of them failed."""
        self._strikes: dict[Instance, int] = {}

    @property
    def local(self) -> bool:
        """Whether all are on this machine."""
        return all(_local(instance.client.url) for instance in self.members)

    def succeeded(self) -> None:
        """The sync was finished: what went wrong before does not count any more."""
        self._strikes.clear()

    async def each(self, act: Callable[[Instance], Awaitable[Any]]) -> list[Any]:
        """`act` with every member at once. A member that fails is left out. The others' results, in their order.

        Raises the first WeightSyncError or refusal when no member is left and not all of them just died.
        """
        members = self.members
        results = await asyncio.gather(*(act(instance) for instance in members), return_exceptions=True)
        failed = {
            one: result for one, result in zip(members, results, strict=True) if isinstance(result, BaseException)
        }
        self._leave_out(failed)
        return [result for result in results if not isinstance(result, BaseException)]

    async def in_turn(self, act: Callable[[Instance], Awaitable[Any]]) -> None:
        """`act` with one member after the other, also after one that failed; else as `each`."""
        failed: dict[Instance, BaseException] = {}
        for instance in self.members:
            results = await asyncio.gather(act(instance), return_exceptions=True)
            if isinstance(error := results[0], BaseException):
                failed[instance] = error
        self._leave_out(failed)

    async def together(self, act: Callable[[Instance], Coroutine[Any, Any, None]]) -> bool:
        """`act` with every member of a group at once. As soon as one can't go on, the calls to the others end.

        One that died or refused is left out, one that failed otherwise may try again. Whether all members succeeded.
        """
        tasks = {asyncio.create_task(act(instance)): instance for instance in self.members}
        pending = set(tasks)
        broken = False
        while pending and not broken:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            broken = any(task.exception() is not None and not isinstance(task.exception(), Refused) for task in done)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        failed = {
            one: error
            for task, one in tasks.items()
            if not task.cancelled() and (error := task.exception()) is not None
        }
        if failed or pending:
            self.connected = []
        struck = [one for one, error in failed.items() if isinstance(error, InstanceFault)]
        self._leave_out({one: error for one, error in failed.items() if one not in struck})
        self.strike(struck, "; ".join(str(failed[one]) for one in struck))
        return not failed and not pending

    def strike(self, instances: Iterable[Instance], reason: str) -> None:
        """Another member may be to blame: leave one out only when it fails so often in a row."""
        for instance in list(instances):
            self._strikes[instance] = self._strikes.get(instance, 0) + 1
            if self._strikes[instance] >= STRIKES:
                why = f"{instance.name}: {STRIKES} weight transfers in a row failed: {reason}"
                self._leave_out({instance: WeightSyncError(why)})

    def _leave_out(self, failed: dict[Instance, BaseException]) -> None:
        for instance, error in failed.items():
            if not isinstance(error, MetronomeError):
                raise error
            self._pool.exclude(instance, str(error))
            self.connected = []
        self.members = [instance for instance in self.members if instance not in failed]
        fatal = [error for error in failed.values() if isinstance(error, FATAL)]
        if fatal and not self.members:
            raise WeightSyncError(str(fatal[0])) from None


def _local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host == "localhost" or _is_loopback(host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
