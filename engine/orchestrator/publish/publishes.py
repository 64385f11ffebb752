"""Publishes of weights: a version goes to the instances in two phases, is compared with the trainer's, and those that
fail are left out.

Open: the members are paused and begin the update. The trainer's sender then announces the buckets one by one; every
member receives each and verifies it by checksums. Finish: each member names the version, computes its log-probabilities
of a few fixed tokens, and serves again. Verify: they must be the trainer's, which computes its own while the first
responses of the new weights are sampled. Such responses are held back until then, and are lost if it fails.

    idle         -- decide_again -->  again   the trainer waits for rows, and an instance for weights
    idle, again  -- open         -->  open    buckets may follow
    open         -- open, abort  -->  open    the sender begins again, without those that have failed
    open         -- finish       -->  sent    members swap, or do so in the background (staged weights, modes ahead)
    sent         -- verify       -->  idle    once the last member has swapped and been compared
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from enum import Enum
from functools import partial
from typing import Any, NoReturn
from urllib.parse import urlsplit

from engine.config import Config
from engine.errors import BadInput, DeadlineError, MetronomeError, ServiceConflict, WeightSyncError
from engine.orchestrator.pool.instance import Instance
from engine.orchestrator.pool.instance_client import InstanceFault, Refused
from engine.orchestrator.pool.pool import Pool
from engine.orchestrator.publish.probe import Probe
from engine.orchestrator.publish.update_calls import UpdateCalls
from engine.orchestrator.run_state import RunState
from engine.orchestrator.steps import Step, Steps
from engine.run.trace import Trace
from engine.schedule import Schedule
from engine.wire.access_token import is_loopback
from engine.wire.messages import (
    AbortSync,
    AwaitVersion,
    ConnectSync,
    Done,
    FinishSync,
    MayPublish,
    OpenSync,
    Proceed,
    PublishAllowed,
    SendBucket,
    StillWaiting,
    SyncOpened,
    VerifySync,
)
from engine.wire.rollout_messages import Connect, GetHealth, InitInfo, StagedWeights

FATAL = (Refused, WeightSyncError, BadInput)
"""Errors that do not mean that an instance has died: the data sent, or what the instance computes from it, is wrong."""
PATIENCE_S = 5.0
"""The longest time in seconds that a living instance takes to answer GET /health."""


class State(Enum):
    """What the publishes of a run do now."""

    IDLE = "idle"
    """Nothing is open."""
    AGAIN = "again"
    """The last version must go again. Every replica group of the trainer is told so, and gets no window."""
    OPEN = "open"
    """Buckets may follow."""
    SENT = "sent"
    """The members swap, or will, and are compared."""


class Publishes:
    """Gives every instance exactly the version that the trainer publishes. Otherwise the run fails and names the cause.

    One publish is in progress at a time. While the state is idle or again, each instance that takes prompts holds
    `version` and computes with the trainer's weights. An instance that lacks them takes no prompts.

    The first version may be any, for a trainer that resumes. Each later one is the next version, or the last one
    again: to all instances if the trainer was restarted, or only to those that lack it (`decide_again`). A
    WeightSyncError ends the run, since the instances may hold anything.
    """

    def __init__(
        self,
        config: Config,
        pool: Pool,
        probe: Probe | None,
        steps: Steps,
        run_state: RunState,
        trace: Trace,
        allows_publish: Callable[[bool], bool] = lambda serves: True,
        on_verified: Callable[[int], None] = lambda version: None,
        trains: bool = True,
    ) -> None:
        """`allows_publish`: returns False while an evaluation needs the current weights. Its argument: whether any
        instance serves. `on_verified`: called with a new version that all instances hold and that has been compared.
        `trains`: whether the trainer is ours."""
        schedule = Schedule.of(config.train, config.rollout.partial)
        self._pool = pool
        self._probe = probe
        self._steps = steps
        self._run_state = run_state
        self._trace = trace
        self._allows_publish = allows_publish
        self._on_verified = on_verified
        self._trains = trains
        self._timeout_s = config.rollout.timeout_s
        """Deadline of every call to an instance."""
        self._exact = schedule.exact
        self._staged = config.weights.staged
        """Whether instances receive buckets while they generate, and swap them in at finish."""
        self._cut = config.rollout.partial
        """Whether responses in progress are interrupted and continued later; otherwise the publish waits for them."""
        self._swaps_late = schedule.ahead > 0 and self._staged
        """Whether instances swap to staged weights once they have finished their responses, while the trainer goes on.
        This is the delayed parameter update of AsyncFlow §4.2.3."""
        self._in_turn = self._swaps_late and not self._exact and not self._cut
        """Whether they swap one after the other, while those whose turn has not come go on with the old weights."""
        self.state = State.IDLE
        """See the module's docstring."""
        self.version: int | None = None
        """The newest version that every instance was told to serve; None before the first."""
        self.verified: int | None = None
        """The newest version that every instance holds and that has been compared; None before the first."""
        self.members: list[Instance] = []
        """The instances of the publish in progress, without those that have failed."""
        self.failed: set[Instance] = set()
        """Those that have failed in it, in any attempt."""
        self.swap: asyncio.Task[None] | None = None
        """The last swap in the background; None if the last publish had none."""
        self.difference: float | None = None
        """The largest difference between the trainer's and an instance's log-probabilities of the probe under the last
        version that was compared; None if none was."""
        self._opened: tuple[int | None, bool] = (None, False)
        """The version that was opened last, and whether it went again, only to the instances that lack it."""
        self._began = 0.0
        self._took_s = 0.0
        """Seconds that the last publish took, from its OpenSync to its FinishSync."""
        self._late: set[Instance] = set()
        """Members that did not serve when the publish was opened. What they still compute is of no use."""
        self._connected: list[Instance] = []
        """The members of the last generation's communication groups; empty once one of them has failed."""
        self._sizes: list[int] = []
        self._generation = 0
        self._one_bucket = asyncio.Lock()
        self._expected: asyncio.Future[Sequence[float] | None] | None = None
        """The trainer's log-probabilities of the probe under the version of the publish in progress."""
        self._checks: dict[Instance, asyncio.Task[None]] = {}
        """Comparisons in progress."""
        self._apart: dict[Instance, float] = {}
        """The differences that the comparisons have found."""
        self._calls = UpdateCalls(probe, self._timeout_s)
        pool.check_arrivals(self._calls.self_test)

    # whether a version goes now -------------------------------------------------------------------

    async def may_publish(self, request: MayPublish) -> PublishAllowed:
        """Reply whether weights may be published now; the trainer asks again if not.

        The last swap must be finished, and no evaluation may need the current weights. If each batch has one version
        and weights are not swapped in the background, all batches in flight must be generated. If no instance
        serves, do not wait: the old version can't be sent any more, so the missing responses come from the next one.
        """
        self._run_state.check_failure()
        self._check_version(request.version)
        now = await self._run_state.wait_briefly(lambda: self._may_publish_now() or None)
        return PublishAllowed(now is not None)

    def _check_version(self, version: int) -> None:
        """Raise ServiceConflict if the schedule does not allow the version now."""
        due = version if self.version is None else self.version + 1
        if version not in (due, self.version) or version < 0:
            raise ServiceConflict(
                f"weight version {version}: version {self.version} was published last, so the next is {due}"
            )
        for step in self._steps.values():
            if step.number < version and step.trained < step.expected:
                raise ServiceConflict(
                    f"weight version {version}: not every group of step {step.number} is acknowledged ({step.arrived} "
                    f"of {step.expected} have arrived)"
                )

    def _may_publish_now(self) -> bool:
        serves = self._pool.serving > 0
        generated = self._swaps_late or not self._exact or not serves or _are_generated(self._steps.values())
        return generated and (self.swap is None or self.swap.done()) and self._allows_publish(serves)

    def decide_again(self, idle_s: float) -> bool:
        """Enter the state "again" if the last version must go to the instances that lack it. Return whether it must.

        The caller guarantees that the trainer's weights are this version's and that the trainer has held no lease for
        `idle_s`. If other instances serve, this must have lasted as long as the last publish took, so that another one
        costs no more than the trainer has waited already.
        """
        if self._is_settled and self.is_awaited and (self._pool.serving == 0 or idle_s >= self._took_s):
            self.state = State.AGAIN
        return self.state is State.AGAIN

    @property
    def _is_settled(self) -> bool:
        """Whether the last version is published and compared, and none is open."""
        return self.state in (State.IDLE, State.AGAIN) and self.verified is not None

    @property
    def is_awaited(self) -> bool:
        """Whether an instance waits for the last version and has not failed to load it, unless no other one is left."""
        return bool(self._find_members(again=True))

    @property
    def is_lost(self) -> bool:
        """Whether no instance of a service holds the last version, so that its trainer must publish it again. Our own
        trainer is told so when it asks for rows."""
        return not self._trains and self._is_settled and self._pool.size == 0

    # a publish, as the trainer's sender goes through it -------------------------------------------

    async def open(self, request: OpenSync) -> SyncOpened:
        """Begin a publish, or begin it again: pause the instances that will get the version. Waits until there is one
        (up to the pool's limit). Raises the error that stops the run, if any."""
        version = request.version
        self._run_state.check_failure()
        self._check_version(version)
        if self.state is State.SENT:
            await self._refuse_uncompared()
        if request.again and version != self.version:
            raise ServiceConflict(f"weight version {version} can't go again: version {self.version} was published last")
        if version == self.version and not request.again:
            for number in self._steps.numbers:  # what the trainer had trained is lost
                self._steps.again(number)
        self.state = State.OPEN
        if self._opened != (version, request.again):
            self._opened = (version, request.again)
            self.failed.clear()
        self._began = time.time()
        self.members = await self._pool.wait_for(partial(self._find_members, request.again))
        if self.version is None:
            await self._pool.wait_for_checks()  # later ones join at the next version, or by this one again
            self.members = await self._pool.wait_for(partial(self._find_members, request.again))
        self._expected = asyncio.get_running_loop().create_future()
        await self._pause_members(f"weight version {version}")
        if self.members != self._connected:
            self._connected = []
            self._generation += 1
        return SyncOpened(
            generation=self._generation,
            members=tuple(instance.name for instance in self.members),
            world_size=1 + sum(self._sizes),
            connect=not self._connected,
            local=all(_is_local(instance.client.url) for instance in self.members),
            probe=self._probe.token_ids if self._probe is not None else (),
        )

    async def _refuse_uncompared(self) -> NoReturn:
        version, _ = self._opened
        if self._expected is not None and self._expected.done():
            raise ServiceConflict(f"weight version {version} is still being swapped in; ask again (MayPublish)")
        if not self._trains:
            raise ServiceConflict(
                f"weight version {version} waits to be compared with the trainer's (VerifySync); if the program that "
                "published it has died, start the service again"
            )
        await self._fail(f"weight version {version} was never compared with the trainer's, which may have died before")

    def _find_members(self, again: bool) -> list[Instance] | None:
        """Return the members of an attempt that begins now; None if it must wait for one. One that has failed in an
        earlier attempt is a member only if no other instance is left.

        If the version goes `again`, its members are the instances that lack it. There may be none if others serve.
        """
        found = [one for one in self._pool.members() if not (again and one.takes_prompts)]
        members = [one for one in found if one not in self.failed]
        if again and self._pool.serving:
            return members
        return members or found or None

    async def _pause_members(self, during: str) -> None:
        self._late = {one for one in self.members if not one.takes_prompts}
        for instance in self.members:
            if not (self._staged and instance.takes_prompts):
                instance.begin_update()
        if not self._staged:
            await self._each(partial(self._begin_update, during=during))
        self._sizes = await self._each(partial(self._calls.world_size, during=during))

    async def _begin_update(self, instance: Instance, during: str) -> None:
        await self._calls.begin_update(instance, during, abort=self._cut or instance in self._late)

    async def connect(self, request: ConnectSync) -> Proceed:
        """Have all members join the communication groups of the stages, while the senders create them."""
        self._check_open(request.version)
        ranks = {instance: 1 + sum(self._sizes[:number]) for number, instance in enumerate(self.members)}

        async def join(instance: Instance) -> None:
            info = InitInfo(
                transport=request.transport,
                generation=self._generation,
                stages=list(request.stages),
                world_size=1 + sum(self._sizes),
                rank=ranks[instance],
                timeout_s=self._timeout_s,
            )
            await self._calls.send_request(instance, Connect(info), f"weight version {request.version}")

        if await self._together(join):
            self._connected = list(self.members)
            return Proceed()
        return Proceed(retry=True)

    async def send(self, request: SendBucket) -> Proceed:
        """Have every member receive the same bucket, one bucket at a time.

        Raises WeightSyncError if every member refuses the bucket, because then the bucket is wrong.
        """
        info = request.info
        self._check_open(info.version)
        info.staged = self._staged
        async with self._one_bucket:

            async def receive(instance: Instance) -> None:
                await self._calls.update_weights(instance, info, info.title)

            if info.transport == "file":
                await self._each(receive)
                return Proceed()
            return Proceed(retry=not await self._together(receive))

    async def abort(self, request: AbortSync) -> Proceed:
        """Handle a sender that failed to send: leave out instances that no longer answer, and have the communication
        groups created again."""
        self._check_open(request.version)
        self._connected = []

        async def answers(instance: Instance) -> None:
            await instance.client.call(GetHealth(), timeout_s=min(PATIENCE_S, self._timeout_s))

        await self._each(answers)
        return Proceed(retry=True)

    async def finish(self, request: FinishSync) -> Done:
        """Have every member serve the version, or leave it out, or start a task that does so in the background. A
        second request for the same version has no effect."""
        if self.state is not State.OPEN and request.version == self.version:
            self._run_state.check_failure()
            return Done()  # a message that was sent twice
        self._check_open(request.version)
        self.state = State.SENT
        self._took_s = time.time() - self._began
        _, again = self._opened
        if self._swaps_late and not again and self._pool.serving:  # else there is nothing to wait for
            self.swap = asyncio.create_task(self._swap_in_background(request.version, self._steps.values()))
        else:
            self.swap = None
            await self._swap_members(request.version)
        self.version = request.version
        return Done()

    async def verify(self, request: VerifySync) -> Done:
        """Take the trainer's log-probabilities of the probe, for comparison with those of every instance.

        The comparison ends before this returns, or is part of the swap in the background.
        """
        self._run_state.check_failure()
        if self.state is not State.SENT or self._expected is None or self._expected.done():
            raise ServiceConflict("no weight version waits to be verified")
        self._expected.set_result(request.expected or None)
        if self.swap is None:
            await self._compare_members()
        return Done()

    async def await_version(self, request: AwaitVersion) -> Done | StillWaiting:
        """Wait until all instances hold the version and have been compared; the caller asks again if this takes
        long."""
        found = await self._run_state.wait_briefly(
            lambda: Done() if self.verified is not None and self.verified >= request.version else None
        )
        return found or StillWaiting()

    def _check_open(self, version: int) -> None:
        self._run_state.check_failure()
        is_open = self.state is State.OPEN
        offered, _ = self._opened
        if version != offered or not is_open:
            how = "is" if is_open else "was, and its sync is over"
            raise ServiceConflict(f"weight version {version} is not open for weights; version {offered} {how}")

    # the swap -------------------------------------------------------------------------------------

    async def _swap_in_background(self, version: int, steps: Sequence[Step]) -> None:
        """Have the members swap and be compared. If each batch has one version, wait first until `steps` are generated,
        or no instance is left that generates them. Otherwise each instance swaps when it becomes free."""
        try:
            while self._exact and self._pool.serving and not _are_generated(steps):
                await self._run_state.wait_briefly(lambda: _are_generated(steps) or None)
            await self._swap_members(version)
            await self._compare_members()
        except MetronomeError as error:
            await self._run_state.stop_run(error)
        await self._run_state.notify()

    async def _swap_members(self, version: int) -> None:
        async def complete(instance: Instance) -> None:
            if self._staged and instance.takes_prompts:
                instance.begin_update()
            found = await self._swap(instance, version) if instance.updating else []
            if instance.updating:
                instance.record_version(version)
                self._checks[instance] = asyncio.create_task(self._compare(instance, version, found))
                self._pool.admit_instance(instance)
            else:  # it left or was left out since `open`
                self._connected = []

        await self._each(complete, in_turn=self._in_turn)
        self._trace.add_span("sync", self._began, time.time(), lane="instances", step=version)

    async def _swap(self, instance: Instance, version: int) -> list[float]:
        """Have an instance serve the version. Return its log-probabilities of the probe."""
        during = f"weight version {version}"
        if self._staged:
            await self._begin_update(instance, during)
            await self._calls.update_weights(instance, StagedWeights(version), during)
        instance.hold_responses()
        return await self._calls.finish_update(instance, version, during)

    # the comparison -------------------------------------------------------------------------------

    async def _compare_members(self) -> None:
        """Check that every member computes with the trainer's weights. One that does not is left out and its responses
        are lost. Raises WeightSyncError if all living members compute with something else."""
        version, again = self._opened
        expected = await self._wait_for_expected(version)
        checks = self._checks

        async def check(instance: Instance) -> None:
            if instance not in checks:
                return
            if instance.state in ("serving", "draining"):
                await checks[instance]
            else:  # it was left out, and its responses are lost
                checks[instance].cancel()
                await asyncio.gather(checks[instance], return_exceptions=True)

        await self._each(check)
        if expected is not None:
            before = [self.difference or 0.0] if again else []
            self.difference = max([*self._apart.values(), *before], default=0.0)
            self._calls.keep_noise(self.difference)
        self._apart = {}
        self._checks = {}
        self.state = State.IDLE
        self.verified = version
        if version is not None and not again:
            self._on_verified(version)
        await self._run_state.notify()

    async def _compare(self, instance: Instance, version: int, found: Sequence[float]) -> None:
        assert self._expected is not None, "`open` has made it"
        expected = await asyncio.shield(self._expected)  # `_compare_members` has the deadline
        self._apart[instance] = self._calls.compare_probe(instance, version, found, expected)
        instance.release_responses()

    async def _wait_for_expected(self, version: int | None) -> Sequence[float] | None:
        """Wait for the trainer's log-probabilities, and return them; None if it has none."""
        assert self._expected is not None, "`open` has made it"
        try:
            return await asyncio.wait_for(asyncio.shield(self._expected), self._timeout_s)
        except TimeoutError:
            raise DeadlineError(
                "the trainer did not report its log-probabilities of the fixed tokens under weight version "
                f"{version} within {self._timeout_s:g} s"
            ) from None

    # all members ----------------------------------------------------------------------------------

    async def _each(self, act: Callable[[Instance], Awaitable[Any]], in_turn: bool = False) -> list[Any]:
        """Run `act` on all members, at once or `in_turn`. A member that fails is left out. Return the others' results,
        in order.

        Raises the first WeightSyncError or refusal if no member is left and not all of them just died.
        """
        members = self.members
        results: list[Any] = []
        for group in [[one] for one in members] if in_turn else [members]:
            results += await asyncio.gather(*map(act, group), return_exceptions=True)
        failed = {
            one: result for one, result in zip(members, results, strict=True) if isinstance(result, BaseException)
        }
        await self._leave_out(failed)
        return [result for result in results if not isinstance(result, BaseException)]

    async def _together(self, act: Callable[[Instance], Coroutine[Any, Any, None]]) -> bool:
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
            self._connected = []
        await self._leave_out(
            {
                one: error
                for one, error in failed.items()
                if not isinstance(error, InstanceFault) or one.record_failure()  # another one may be to blame
            }
        )
        return not failed and not pending

    async def _leave_out(self, failed: dict[Instance, BaseException]) -> None:
        for instance, error in failed.items():
            if not isinstance(error, MetronomeError):
                raise error
            self._pool.leave_out(instance, error)
            self._connected = []
        self.failed.update(failed)
        self.members = [instance for instance in self.members if instance not in failed]
        fatal = [error for error in failed.values() if isinstance(error, FATAL)]
        _, again = self._opened
        if fatal and not self.members and not (again and self._pool.serving):
            await self._fail(str(fatal[0]))

    async def _fail(self, why: str) -> NoReturn:
        error = WeightSyncError(why)
        await self._run_state.stop_run(error)
        raise error

    # the end --------------------------------------------------------------------------------------

    def check_swap(self) -> None:
        """Raise the unexpected exception of a finished swap, if any. It is a bug in the orchestrator."""
        if self.swap is not None and self.swap.done():
            self.swap.result()

    async def close(self) -> None:
        """Cancel the swap in the background and the comparisons in progress."""
        tasks = [*([self.swap] if self.swap is not None else []), *self._checks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _are_generated(steps: Sequence[Step]) -> bool:
    return all(step.is_generated for step in steps)


def _is_local(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:  # the name of a host
        return False
