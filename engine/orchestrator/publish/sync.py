"""Weight syncs: two phases, with every instance checked, and those that fail left out.

Open: the instances that will get the version are paused, and begin the update. The trainer's sender then announces the
buckets one by one; every instance receives each bucket and verifies it by checksums. Finish: each instance names the
version, computes its log-probabilities of a few fixed tokens, and serves again. Checked: they must be the trainer's.
The trainer computes its own while the first responses of the new weights are being sampled. Such responses are held
back until the check has passed (InstanceClient.hold_responses), and are lost if it fails. Once per connection, an
instance shows that it follows new weights at all: it loads visibly perturbed weights and its log-probabilities must
move.

`Participants` acts on all instances of one sync together, and leaves out those that fail.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from engine.errors import BadInput, DeadlineError, MetronomeError, WeightSyncError
from engine.orchestrator.pool.instance import Instance
from engine.orchestrator.pool.instance_client import InstanceFault, Refused
from engine.orchestrator.publish.probe import Probe, make_probe
from engine.orchestrator.publish.update_calls import UpdateCalls
from engine.wire.messages import (
    AbortSync,
    ConnectSync,
    FinishSync,
    OpenSync,
    Proceed,
    SendBucket,
    SyncOpened,
)
from engine.wire.rollout_messages import Connect, GetHealth, InitInfo, StagedWeights

T = TypeVar("T")

FATAL = (Refused, WeightSyncError, BadInput)
"""Errors that do not mean that an instance has died: the data sent, or what the instance computes from it, is wrong."""


class SyncPool(Protocol):
    """What the weight sync needs from the pool."""

    @property
    def serving(self) -> int:
        """Number of instances that take prompts now."""

    def members(self) -> list[Instance]:
        """Instances that must receive the next version."""

    async def wait_for(self, find: Callable[[], T | None]) -> T:
        """Wait until `find` returns something, and return it. Raises the error with which the pool gives up."""

    async def wait_for_checks(self) -> None:
        """Wait until every instance that has answered has passed its first check or has failed it."""

    def leave_out(self, instance: Instance, error: MetronomeError) -> None:
        """Send a failed instance no prompts until it has received the weights again."""

    def admit_instance(self, instance: Instance) -> None:
        """Let an instance that holds the current weights take prompts."""


class Participants:
    """The members of the sync in progress."""

    def __init__(self, pool: SyncPool) -> None:
        self._pool = pool
        self.again = False
        """Whether the last version goes again, only to the instances that lack it."""
        self.members: list[Instance] = []
        self.failed: set[Instance] = set()
        """Those that have failed in this publish, in any attempt."""
        self.connected: list[Instance] = []
        """The members of the last generation's communication groups; empty once one of them has failed."""

    @property
    def local(self) -> bool:
        """Whether all members are on this machine."""
        return all(_local(instance.client.url) for instance in self.members)

    async def open(self, again: bool) -> None:
        """Choose the members of an attempt, once there is one. One that has failed in an earlier attempt is a member
        only if no other instance is left.

        If the version goes `again`, its members are the instances that lack it. There may be none if others serve.
        """
        self.again = again
        self.members = await self._pool.wait_for(partial(self.find_members, again))

    def find_members(self, again: bool) -> list[Instance] | None:
        """Return the members of an attempt that begins now; None if it must wait for one."""
        found = [one for one in self._pool.members() if not (again and one.takes_prompts)]
        members = [one for one in found if one not in self.failed]
        if again and self._pool.serving:
            return members
        return members or found or None

    async def each(self, act: Callable[[Instance], Awaitable[Any]]) -> list[Any]:
        """Run `act` on all members at once. A member that fails is left out. Return the others' results, in order.

        Raises the first WeightSyncError or refusal if no member is left and not all of them just died.
        """
        members = self.members
        results = await asyncio.gather(*(act(instance) for instance in members), return_exceptions=True)
        failed = {
            one: result for one, result in zip(members, results, strict=True) if isinstance(result, BaseException)
        }
        self._leave_out(failed)
        return [result for result in results if not isinstance(result, BaseException)]

    async def in_turn(self, act: Callable[[Instance], Awaitable[Any]]) -> None:
        """Run `act` on one member after the other, even after a failure; else like `each`."""
        failed: dict[Instance, BaseException] = {}
        for instance in self.members:
            results = await asyncio.gather(act(instance), return_exceptions=True)
            if isinstance(error := results[0], BaseException):
                failed[instance] = error
        self._leave_out(failed)

    async def together(self, act: Callable[[Instance], Coroutine[Any, Any, None]]) -> bool:
        """Run `act` on every member of a communication group at once. If one can't continue, the calls to the others
        end.

        A member that died or refused is left out. One that failed otherwise may try again. Return whether all
        succeeded.
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
        self._leave_out(
            {
                one: error
                for one, error in failed.items()
                if not isinstance(error, InstanceFault) or one.record_failure()  # another one may be to blame
            }
        )
        return not failed and not pending

    def _leave_out(self, failed: dict[Instance, BaseException]) -> None:
        for instance, error in failed.items():
            if not isinstance(error, MetronomeError):
                raise error
            self._pool.leave_out(instance, error)
            self.connected = []
        self.failed.update(failed)
        self.members = [instance for instance in self.members if instance not in failed]
        fatal = [error for error in failed.values() if isinstance(error, FATAL)]
        if fatal and not self.members and not (self.again and self._pool.serving):
            raise WeightSyncError(str(fatal[0])) from None


def _local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host == "localhost" or _is_loopback(host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


__all__ = ["Probe", "WeightSync", "make_probe"]

PATIENCE_S = 5.0
"""The longest time in seconds that a living instance takes to answer GET /health."""


class WeightSync:
    """The weight sync of a run. The trainer's sender calls open … finish in order."""

    def __init__(
        self,
        pool: SyncPool,
        probe: Probe | None,
        timeout_s: float,
        staged: bool = False,
        cut: bool = False,
        in_turn: bool = False,
    ) -> None:
        """`timeout_s`: deadline of every call. `staged`: instances receive buckets while they generate, and swap them
        in at finish. `cut`: responses in progress are interrupted and continued later (rollout.partial); otherwise the
        sync waits for them. `in_turn`: instances swap in staged weights one after the other, while those whose turn has
        not come continue with the old weights."""
        self._cut = cut
        self._in_turn = in_turn and staged
        self._pool = pool
        self._probe = probe
        self._timeout_s = timeout_s
        self._staged = staged
        self._calls = UpdateCalls(probe, timeout_s)
        self._version: int | None = None
        self._trainer_logprobs: asyncio.Future[Sequence[float] | None] | None = None
        """The trainer's log-probabilities of the probe under the version of the publish in progress."""
        self._checks: dict[Instance, asyncio.Task[None]] = {}
        """Comparisons in progress."""
        self._apart: dict[Instance, float] = {}
        """The differences that the comparisons have found."""
        self.difference: float | None = None
        """The largest difference between the trainer's and an instance's log-probabilities of the probe under the last
        version that was compared; None if none was."""
        self._unchecked = False
        self._participants = Participants(pool)
        self._sizes: list[int] = []
        self._generation = 0
        self._one_bucket = asyncio.Lock()
        self._late: set[Instance] = set()
        """Members that did not serve when the sync was opened. What they still compute is of no use."""
        self._opened: tuple[int, bool] | None = None
        """Version of the publish whose failed instances are known, and whether it goes again."""

    @property
    def version(self) -> int | None:
        """Version of the last completed publish, or None."""
        return self._version

    @property
    def is_awaited(self) -> bool:
        """Whether an instance waits for the last version and has not failed to load it, unless no other one is left."""
        return bool(self._participants.find_members(again=True))

    # a publish, as the trainer's sender goes through it -------------------------------------------

    async def open_sync(self, request: OpenSync) -> SyncOpened:
        """Pause the instances that will get the version. Waits until there is one (up to the pool's limit)."""
        version = request.version
        if self._unchecked:
            raise MetronomeError(
                f"weight version {self._version} was not compared with the trainer's before version {version}"
            )
        if self._opened != (version, request.again):
            self._opened = (version, request.again)
            self._participants.failed.clear()
        await self._participants.open(request.again)
        if self._version is None:
            await self._pool.wait_for_checks()  # later ones join at the next version, or by this one again
            await self._participants.open(request.again)
        self._trainer_logprobs = asyncio.get_running_loop().create_future()
        self._late = {one for one in self._participants.members if not one.takes_prompts}
        for instance in self._participants.members:
            if not (self._staged and instance.takes_prompts):
                instance.begin_update()
        during = f"weight version {version}"
        if not self._staged:
            await self._participants.each(partial(self._begin_update, during=during))
        self._sizes = await self._participants.each(partial(self._calls.world_size, during=during))
        if self._participants.members != self._participants.connected:
            self._participants.connected = []
            self._generation += 1
        return SyncOpened(
            generation=self._generation,
            members=tuple(instance.name for instance in self._participants.members),
            world_size=1 + sum(self._sizes),
            connect=not self._participants.connected,
            local=self._participants.local,
            probe=self._probe.token_ids if self._probe is not None else (),
        )

    async def connect_sync(self, request: ConnectSync) -> Proceed:
        """Have all members join the communication groups of the stages, while the senders create them."""
        sizes = self._sizes
        ranks = {instance: 1 + sum(sizes[:number]) for number, instance in enumerate(self._participants.members)}

        async def join(instance: Instance) -> None:
            info = InitInfo(
                transport=request.transport,
                generation=self._generation,
                stages=list(request.stages),
                world_size=1 + sum(sizes),
                rank=ranks[instance],
                timeout_s=self._timeout_s,
            )
            await self._calls.send_request(instance, Connect(info), f"weight version {request.version}")

        if await self._participants.together(join):
            self._participants.connected = list(self._participants.members)
            return Proceed()
        return Proceed(retry=True)

    async def send_bucket(self, request: SendBucket) -> Proceed:
        """Have every member receive the same bucket, one bucket at a time.

        Raises WeightSyncError if every member refuses the bucket, because then the bucket is wrong.
        """
        info = request.info
        info.staged = self._staged
        async with self._one_bucket:

            async def receive(instance: Instance) -> None:
                await self._calls.update_weights(instance, info, info.title)

            if info.transport == "file":
                await self._participants.each(receive)
                return Proceed()
            return Proceed(retry=not await self._participants.together(receive))

    async def abort_sync(self, request: AbortSync) -> Proceed:
        """Handle a sender that failed to send: leave out instances that no longer answer, and have the communication
        groups created again."""
        self._participants.connected = []

        async def answers(instance: Instance) -> None:
            await instance.client.call(GetHealth(), timeout_s=min(PATIENCE_S, self._timeout_s))

        await self._participants.each(answers)
        return Proceed(retry=True)

    async def finish_sync(self, request: FinishSync) -> None:
        """Have every member serve the version, or leave it out. Call `wait_until_checked` before any response of the
        version is used. Raises WeightSyncError if all living members hold something else."""
        version = request.version
        self._unchecked = True

        async def complete(instance: Instance) -> None:
            if self._staged and instance.takes_prompts:
                instance.begin_update()
            found = await self._swap(instance, version) if instance.updating else []
            if instance.updating:
                instance.record_version(version)
                self._checks[instance] = asyncio.create_task(self._compare(instance, version, found))
                self._pool.admit_instance(instance)
            else:  # it left or was left out since `open_sync`
                self._participants.connected = []

        await (self._participants.in_turn if self._in_turn else self._participants.each)(complete)
        self._version = version

    async def _swap(self, instance: Instance, version: int) -> list[float]:
        """Have an instance serve the version. Return its log-probabilities of the probe."""
        during = f"weight version {version}"
        if self._staged:
            await self._begin_update(instance, during)
            await self._calls.update_weights(instance, StagedWeights(version), during)
        instance.hold_responses()
        return await self._calls.finish_update(instance, version, during)

    def expect_logprobs(self, expected: Sequence[float]) -> None:
        """Set the trainer's log-probabilities of the probe under the version that was opened last; empty: it has
        none."""
        if self._trainer_logprobs is not None and not self._trainer_logprobs.done():
            self._trainer_logprobs.set_result(expected or None)

    async def wait_until_checked(self) -> None:
        """Check, after `finish_sync` and `expect_logprobs`, that every member computes with the trainer's weights. A
        member that does not is left out and its responses are lost. Raises WeightSyncError if all living members
        compute with something else."""
        checks = self._checks

        async def check(instance: Instance) -> None:
            if instance not in checks:
                return
            if instance.state in ("serving", "draining"):
                await checks[instance]
            else:  # it was left out, and its responses are lost
                checks[instance].cancel()
                await asyncio.gather(checks[instance], return_exceptions=True)

        await self._participants.each(check)
        if await self._wait_for_trainer_logprobs() is not None:
            before = [self.difference or 0.0] if self._participants.again else []
            self.difference = max([*self._apart.values(), *before], default=0.0)
            self._calls.noise = self.difference if self._calls.noise is None else self._calls.noise
        self._apart = {}
        self._checks = {}
        self._unchecked = False

    async def _compare(self, instance: Instance, version: int, found: Sequence[float]) -> None:
        expected = await self._wait_for_trainer_logprobs()
        self._apart[instance] = self._calls.compare_probe(instance, version, found, expected)
        instance.release_responses()

    async def _wait_for_trainer_logprobs(self) -> Sequence[float] | None:
        """Wait for the trainer's log-probabilities, and return them."""
        assert self._trainer_logprobs is not None
        try:
            return await asyncio.wait_for(asyncio.shield(self._trainer_logprobs), self._timeout_s)
        except TimeoutError:
            raise DeadlineError(
                "the trainer did not report its log-probabilities of the fixed tokens under weight version "
                f"{self._version} within {self._timeout_s:g} s"
            ) from None

    async def close(self) -> None:
        """Cancel the comparisons in progress."""
        for check in self._checks.values():
            check.cancel()
        await asyncio.gather(*self._checks.values(), return_exceptions=True)

    async def self_test(self, instance: Instance) -> None:
        """Run UpdateCalls.self_test. Raises WeightSyncError if the instance does not follow the weights that it is
        given."""
        await self._calls.self_test(instance)

    async def _begin_update(self, instance: Instance, during: str) -> None:
        await self._calls.begin_update(instance, during, abort=self._cut or instance in self._late)
