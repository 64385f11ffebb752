"""Random sequences of what may happen to the instances of a run: the real pool, health monitor and weight sync over
fake instances, in virtual time."""

import asyncio
import json
import random
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.config import Config
from engine.errors import DeadlineError, MetronomeError
from engine.orchestrator.pool.health import HealthMonitor
from engine.orchestrator.pool.instance import FAILURES, SILENCES
from engine.orchestrator.pool.instance_client import Busy, InstanceFault, InstanceGone, SamplingSettings
from engine.orchestrator.pool.pool import Pool
from engine.orchestrator.publish.publishes import Publishes
from engine.orchestrator.run_state import RunState
from engine.orchestrator.server import Server
from engine.orchestrator.stages import stages_of
from engine.orchestrator.steps import Steps
from engine.types import Prompt
from engine.wire.columns import open_ids
from engine.wire.messages import (
    AbortSync,
    BucketInfo,
    ConnectSync,
    FinishSync,
    OpenSync,
    SendBucket,
    VerifySync,
)
from engine.wire.rollout_messages import ROLLOUT_PROTOCOL
from support.fake_instances import BUCKETS, PROBE, FakeInstance, FakeProcess, FakeProcesses, FakeSession, logprobs
from support.virtual_time import VirtualLoop

CONCURRENCY = 2
GROUP_SIZE = 2
LIMITS = {
    "heartbeat_s": 0.9,
    "wait_s": 12.0,
    "timeout_s": 3.0,
    "restarts": 2,
    "concurrency": CONCURRENCY,
    "group_size": GROUP_SIZE,
}
SETTLED = 30
"""Turns of the event loop after which all that needs no time has happened."""
PACE = (0.0, 0.002, 0.02, 0.1, 0.5)
"""Seconds that may pass after an event."""
NAMES = ("guest", "other")
WHICH = st.sampled_from(range(10))
SAMPLING = SamplingSettings(max_new_tokens=4, temperature=1.0, top_p=1.0, top_k=0, vocabulary=10_000)


def bucket(transport, version, number):
    """A bucket without tensors."""
    return BucketInfo(
        transport=transport, version=version, stage=0, bucket=number, names=[], dtypes=[], shapes=[], checksum=""
    )


class PoolMachine(RuleBasedStateMachine):
    """After every rule the invariants hold; at the end all that was begun ends."""

    def __init__(self):
        super().__init__()
        self.loop = VirtualLoop()
        self.folder = Path(tempfile.mkdtemp())
        self.mistakes = []
        """What went wrong outside of the rules."""
        self.groups = []
        """Tasks, each of one group."""
        self.waiting = []
        """Those of them that wait for a place."""
        self.held = {}
        """Place: the task that was given it."""
        self.sent = []
        """The instance of each response in flight."""
        self.seen = []
        """All instances that ever were in the pool."""
        self.publishing = None
        self.published = 0
        self.loop.set_exception_handler(self.note)

    def note(self, loop, context):
        if not isinstance(context.get("exception"), MetronomeError):
            self.mistakes.append(context)

    def do(self, work):
        async def settled():
            result = await work
            await asyncio.sleep(self.chance.choice(PACE))
            for _ in range(SETTLED):
                await asyncio.sleep(0)
            return result

        return self.loop.run_until_complete(settled())

    # the world ------------------------------------------------------------------------------------

    @initialize(
        seed=st.sampled_from(range(10)),
        declared=st.sampled_from(range(4)),
        synced=st.sampled_from([True, True, True, True, False]),
        published=st.booleans(),
        staged=st.booleans(),
        in_turn=st.booleans(),
        cut=st.booleans(),
        transport=st.sampled_from(["file", "gloo"]),
    )
    def begin(self, seed, declared, synced, published, staged, in_turn, cut, transport):
        self.chance = random.Random(seed)
        self.transport = transport
        self.session = FakeSession()
        config = Config(
            rollout=LIMITS | {"partial": cut},
            weights={"staged": staged},
            train={"mode": "bounded", "max_staleness": 1} if in_turn or cut else {},
        )
        self.pool = Pool(config, self.folder, self.folder, synced=synced)
        self.pool._session = self.session
        self.run_state = RunState()
        self.publishes = synced and Publishes(
            config=config,
            pool=self.pool,
            probe=PROBE,
            steps=Steps(stages_of(config, None)),
            run_state=self.run_state,
            trace=SimpleNamespace(add_span=lambda *given, **more: None),
        )
        self.monitor = HealthMonitor(self.pool)
        self.do(self.connect(declared))
        if published and synced and declared:
            self.publish([0.0] * 4, fails=False, spoils=None, leaves=None)
            self.do(self.ends(self.publishing))

    async def connect(self, declared):
        self.server = Server(self.pool.config)
        self.server.serve_pool(self.pool)
        self.pool.processes = FakeProcesses([FakeProcess(self, number) for number in range(declared)])
        await self.monitor.__aenter__()
        for one in self.pool.processes.declared:
            self.pool.enter(one.name, f"http://127.0.0.1:{one.port}", one)
        self.pool.connected.set()

    def fake(self):
        """A new instance, and its port."""
        port = 4000 + len(self.session.instances)
        made = FakeInstance(lambda: self.chance.choice((0.0, 0.001, 0.01, 0.05, 0.2)))
        self.session.instances[f"http://127.0.0.1:{port}"] = made
        return made, port

    # instances come, go and fail ------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES), again=st.booleans())
    def join(self, name, again):
        self.do(self.ask_to_join(name, again))

    async def ask_to_join(self, name, again):
        _, port = self.fake()
        body = {"protocol": ROLLOUT_PROTOCOL, "name": name, "url": f"http://127.0.0.1:{port}", "again": again}
        await self.ask(self.server._join, body)

    async def ask(self, route, body):
        sent = json.dumps(body).encode()

        async def pieces():
            yield sent

        return await route(SimpleNamespace(content_length=len(sent), content=SimpleNamespace(iter_any=pieces)))

    @precondition(lambda self: self.pool.instances)
    @rule(which=WHICH, how=st.sampled_from(["answer", "hang", "hang", "err", "refuse", "start again", "die"]))
    def fare(self, which, how):
        self.do(self.make(self.session.instances[self.one(which).client.url], how))

    @precondition(lambda self: self.several)
    @rule(which=WHICH)
    def leave(self, which):
        self.do(self.ask(self.server._leave, {"name": self.one(which).name}))

    def one(self, which):
        """Of the pool's instances."""
        return self.pool.instances[which % len(self.pool.instances)]

    @property
    def several(self):
        """Whether one may leave or fail without the end of the run."""
        return sum(one.lives for one in self.pool.instances) > 1

    async def make(self, fake, how):
        if how == "die":
            fake.die()
        elif how == "hang":
            fake.going_on.clear()
        elif how == "err":
            fake.errs = True
        elif how == "refuse":
            fake.paused = True
        elif how == "start again":
            fake.die()
            await asyncio.sleep(0)
            fake.start()
        else:
            fake.errs = False
            fake.spoils = False
            fake.going_on.set()

    # groups ---------------------------------------------------------------------------------------

    @rule(first=st.booleans(), current=st.booleans(), count=st.sampled_from([2, 6, 12]))
    def borrow(self, first, current, count):
        async def begin():
            least = self.publishes.version if current and self.pool.synced else None
            for _ in range(count):
                self.groups.append(asyncio.create_task(self.group(first, least)))

        self.do(begin())

    @precondition(lambda self: self.groups)
    @rule(which=st.sampled_from(range(1, 21)))
    def cancel(self, which):
        self.groups[-which % len(self.groups)].cancel()
        self.do(asyncio.sleep(0))

    @precondition(lambda self: self.waiting and self.held)
    @rule(holder=WHICH, waiter=st.sampled_from(range(2)), turns=st.sampled_from(range(1, 6)))
    def cancel_both(self, holder, waiter, turns):
        """One that waits is cancelled at about the moment at which it is given the place of another one."""

        async def act():
            waits = self.waiting[waiter % len(self.waiting)]
            list(self.held.values())[holder % len(self.held)].cancel()
            for _ in range(turns):
                await asyncio.sleep(0)
            waits.cancel()

        self.do(act())

    async def group(self, first, least):
        """As engine.orchestrator.producer does: the group's requests, each of which ends in one way."""
        task = asyncio.current_task()
        self.waiting.append(task)
        try:
            async with self.pool.borrow((), first, least) as place:
                self.waiting.remove(task)
                self.held[place] = task
                try:
                    self.check_place(place.instance, least)
                    async with asyncio.TaskGroup() as tasks:
                        for seed in range(GROUP_SIZE):
                            self.sent.append(place.instance)
                            tasks.create_task(self.respond(place, seed))
                finally:
                    del self.held[place]
        except MetronomeError as error:
            if error is not self.pool.failure:
                raise
        finally:
            if task in self.waiting:
                self.waiting.remove(task)

    def check_place(self, one, least):
        assert one.state == "serving", one.state
        assert not one.leaving
        if self.pool.synced:
            assert one.version is not None
            assert least is None or one.version >= least

    async def respond(self, place, seed):
        one = place.instance
        try:
            response = await one.client.complete(Prompt("p", "", "", (1, 2)), SAMPLING, seed)
        except Busy:
            pass
        except (InstanceGone, InstanceFault, DeadlineError) as error:
            self.pool.record_failure(place, error)
        else:
            one.record_success()
            ((_, version),) = response.versions
            if open_ids(response.token_ids) != (version,) or response.seed != seed:
                self.mistakes.append(f"a response of weights that are not the trainer's: {response}")
        finally:
            self.sent.remove(one)
            self.pool.free_slot(place)

    # weights --------------------------------------------------------------------------------------

    @precondition(lambda self: self.pool.synced and self.pool.failure is None)
    @precondition(lambda self: self.publishing is None or self.publishing.done())
    @rule(
        pauses=st.lists(st.sampled_from([0.0, 0.02, 0.3, 1.0]), min_size=4, max_size=4),
        fails=st.booleans(),
        spoils=st.sampled_from([None, 0, 1]),
        leaves=st.sampled_from([None, None, 0, 1]),
    )
    def publish(self, pauses, fails, spoils, leaves):
        """`spoils`: which instance takes over other weights than the trainer's, `leaves`: which asks to leave early in
        it; never the only one."""
        self.published += 1

        async def begin():
            self.publishing = asyncio.create_task(self.send(self.published, pauses, fails, spoils))
            if leaves is not None and self.several:
                await asyncio.sleep(0.02)
                await self.ask(self.server._leave, {"name": self.one(leaves).name})

        self.do(begin())
        if spoils is not None:
            self.borrow(first=False, current=False, count=6)

    @precondition(lambda self: self.pool.synced and self.pool.failure is None and self.publishes.verified is not None)
    @precondition(lambda self: self.publishing is None or self.publishing.done())
    @rule(pauses=st.lists(st.sampled_from([0.0, 0.02, 0.3, 1.0]), min_size=4, max_size=4), fails=st.booleans())
    def publish_again(self, pauses, fails):
        """As the trainer does when it waits for rows, and an instance for weights."""

        async def begin():
            if self.publishes.is_awaited:
                work = self.send(self.publishes.version, pauses, fails, None, again=True)
                self.publishing = asyncio.create_task(work)

        self.do(begin())

    async def send(self, version, pauses, fails, spoils, again=False):
        """As engine.client.publish.publisher does; `fails`: it gives up once and begins again."""
        try:
            while not await self.transfer(version, pauses, fails, again):
                fails = False
            if spoils is not None and self.several:
                self.session.instances[self.one(spoils).client.url].spoils = True
            await self.publishes.finish(FinishSync(version=version))
            await asyncio.sleep(pauses[3])
            await self.publishes.verify(VerifySync(expected=tuple(logprobs(version))))
            if self.publishes.swap is not None:
                await self.publishes.swap
            self.run_state.check_failure()
        except MetronomeError as error:
            self.pool.give_up(error)  # the run ends

    async def transfer(self, version, pauses, fails, again):
        opened = await self.publishes.open(OpenSync(version=version, again=again))
        await asyncio.sleep(pauses[0])
        connect = ConnectSync(version=version, transport="gloo", stages=())
        if (
            self.transport == "gloo"
            and opened.connect
            and opened.members
            and (await self.publishes.connect(connect)).retry
        ):
            return False
        for number in range(BUCKETS):
            if (await self.publishes.send(SendBucket(info=bucket(self.transport, version, number)))).retry:
                return False
            await asyncio.sleep(pauses[1 + number])
        if fails:
            await self.publishes.abort(AbortSync(version=version, reason="a sender could not send"))
        return not fails

    # time -----------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.001, 0.01, 0.1, 0.4, 1.0, 2.0, 7.0]))
    def wait(self, seconds):
        self.do(asyncio.sleep(seconds))

    # what always holds ----------------------------------------------------------------------------

    @invariant()
    def holds(self):
        if hasattr(self, "pool"):
            self.places_add_up()
            self.nothing_broke()

    def places_add_up(self):
        self.seen.extend(one for one in self.pool.instances if one not in self.seen)
        for one in self.seen:
            held = sum(place.instance is one for place in self.held)
            assert one.groups == held, f"{one.name}: {one.groups} places given, {held} held"
            assert one.responses >= self.sent.count(one)
            assert one.responses <= CONCURRENCY * GROUP_SIZE
            assert one.failures < FAILURES or one.state == "gone", f"{one.name} has failed {one.failures} times"
            assert one._times_out < SILENCES or one.state == "gone", f"{one.name} was out {one._times_out} times"
            assert not (one.leaving and one.takes_prompts), f"{one.name} asked to leave, and takes prompts"
            assert not held or one.state not in ("out", "gone"), f"{one.name} is {one.state} and was not cut"
            assert one.version is None or one.state not in ("out", "starting") or not self.pool.synced

    def nothing_broke(self):
        assert not self.mistakes, self.mistakes
        for task in self.groups:
            if task.done() and not task.cancelled():
                task.result()
        if self.publishing is not None and self.publishing.done():
            self.publishing.result()

    def teardown(self):
        if hasattr(self, "pool"):
            try:
                self.do(self.come_to_rest())
                self.holds()
                assert not self.held
            finally:
                self.do(self.end())
        self.loop.close()
        shutil.rmtree(self.folder)

    async def come_to_rest(self):
        """All instances are well again: everything that was begun ends, and whoever lives serves."""
        for work in (None, self.publishing):  # a publish under way may still spoil one
            await self.ends(work)
            for fake in self.session.instances.values():
                await self.make(fake, "answer")
        if self.pool.synced and self.pool.failure is None:
            await self.ends(asyncio.create_task(self.send(self.published + 1, [0.0] * 4, fails=False, spoils=None)))
        serving = asyncio.create_task(self.all_serve())  # groups may wait for one that waits for weights
        await self.ends(*self.groups, serving)

    async def ends(self, *tasks):
        if pending := [task for task in tasks if task is not None and not task.done()]:
            _, stuck = await asyncio.wait(pending, timeout=100.0)
            at = [task.get_stack()[-1] for task in stuck][:3]
            assert not stuck, f"{len(stuck)} of {len(pending)} never end: {at}, {self.states()}"

    async def all_serve(self):
        target = self.publishes.version if self.pool.synced else None
        while self.pool.failure is None and not (
            all(one.state == "serving" and one.version == target for one in self.pool.instances)
            and all(group.done() for group in self.groups)
        ):
            if self.pool.synced and self.publishes.is_awaited:
                await self.send(target, [0.0] * 4, fails=False, spoils=None, again=True)
            await asyncio.sleep(0.1)

    def states(self):
        return [(one.name, one.state, one.version, one.groups, one.leaving) for one in self.pool.instances]

    async def end(self):
        tasks = [task for task in (*self.groups, self.publishing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.monitor.__aexit__()
        if self.publishes:
            await self.publishes.close()
        await self.pool.close()
