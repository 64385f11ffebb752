"""Planes in this process: the real pool and publishes over instances that take any weights; groups come when the test
puts them."""

import asyncio
from types import SimpleNamespace

import pytest

from engine.config import Config
from engine.data.loader import PromptLoader
from engine.orchestrator.plane import Plane
from engine.orchestrator.pool.instance import Instance
from engine.orchestrator.pool.pool import Pool
from engine.orchestrator.run_events import RunEvents
from engine.run.folder import RunFolder
from engine.run.trace import Trace
from engine.types import Prompt
from engine.wire.columns import pack_group
from engine.wire.messages import (
    EndOfStep,
    FinishSync,
    Lease,
    OpenSync,
    PutPrompts,
    Ready,
    StillWaiting,
    VerifySync,
    Window,
)
from support.groups import numbered_group

PROMPT = Prompt("id", "1+1=", "2", (1, 2, 3))
LIMIT_S = 0.4


def row(index, step=0):
    return pack_group(numbered_group(index, step))


class Answers:
    """An instance behind the calls of InstanceClient, which takes any weights."""

    url = "http://127.0.0.1:1"

    def __init__(self, name):
        self.name = name
        self.delay_s = 0.0

    async def call(self, request, timeout_s=None):
        await asyncio.sleep(self.delay_s)
        return SimpleNamespace(weight_version=getattr(request, "weight_version", 0), logprobs=[], world_size=1)

    def nothing(self, *given):
        pass

    hold_responses = release_responses = end_calls = nothing


def enter(plane, name):
    """An instance that has come, and waits for weights."""
    instance = Instance(Answers(name))
    instance.met = instance.checked = True
    plane.service.pool.instances.append(instance)
    plane.service.pool.changed()
    return instance


class Rollouts:
    """A producer whose rows come when the test puts them."""

    def __init__(self):
        self.come = asyncio.Queue()

    async def run(self, step, prompts, put, sampled=None):
        for _ in prompts:
            if (index := await self.come.get()) is None:
                return  # a mistake of ours: it ends with groups missing
            await put(row(index, step))


def plane_of(config, folder, producer, loader, **more):
    """A plane with one instance, which has no weights yet."""
    config = config.model_copy(update={"weights": config.weights.model_copy(update={"check_tokens": 0})})
    plane = Plane(
        config=config,
        folder=RunFolder(folder),
        trace=Trace(folder / "trace", "orchestrator"),
        loader=loader,
        service=SimpleNamespace(pool=Pool(config, folder, folder, synced=True), producer=producer, notices=RunEvents()),
        **more,
    )
    enter(plane, "first")
    return plane


async def publish(plane, version, again=False):
    """As the trainer does it."""
    await plane.answer(OpenSync(version=version, again=again))
    await plane.answer(FinishSync(version=version))
    await plane.answer(VerifySync(expected=()))


@pytest.fixture
async def conduct(tmp_path, tiny_model):
    """Makes planes, which are closed at the end. Each is of a trainer of two replica groups, whose version 0 is
    published and whose step of so many groups has begun; with it comes the queue of its groups."""
    planes = []

    async def begin(groups, stages=None, weights=None, **more):
        for_plane = {key: more.pop(key) for key in ("store", "trains") if key in more}
        config = Config(
            model={"path": str(tiny_model)},
            parallel={"data": 2},
            rollout={"timeout_s": 1.2},
            stages=stages or {},
            weights=weights or {},
            train={"prompts_per_step": groups, "timeout_s": LIMIT_S, **more},
        )
        rollouts = Rollouts()
        plane = plane_of(config, tmp_path, rollouts, PromptLoader([PROMPT] * groups, 0, groups), **for_plane)
        await plane.answer(ready(0))
        await publish(plane, 0)
        await plane.answer(PutPrompts(step=0))
        planes.append(plane)
        return plane, rollouts.come

    yield begin
    for plane in planes:
        await plane.close()


def ready(start, prompts=None):
    return Ready(start=start, prompt_position=None, prompts=prompts, replica_groups=2)


async def work(plane, replica_group, hang=lambda leased: False):
    """Lease and train until the end of the step; the indices of the groups. Stops asking once `hang` says so."""
    mine = []
    done = ()
    while True:
        reply = await plane.answer(Lease(step=0, replica_group=replica_group, budget=1, done=done))
        done = (reply.lease,) if isinstance(reply, Window) else ()
        mine += [one.index for one in reply.rows] if isinstance(reply, Window) else []
        if isinstance(reply, EndOfStep) or hang(mine):
            return mine


async def leased(plane, **more):
    async with asyncio.timeout(5):
        while True:
            reply = await plane.answer(Lease(step=0, replica_group=0, budget=1, **more))
            if not isinstance(reply, StillWaiting):
                return reply


async def watch(plane):
    """As the orchestrator does, until the plane fails."""
    while plane.failure is None:
        await plane.check_run()
        await asyncio.sleep(0.02)
    return plane.failure
