"""A plane of a trainer of two replica groups whose rows come when the test puts them."""

import asyncio
from types import SimpleNamespace

import pytest

from engine.config import Config
from engine.data.loader import PromptLoader
from engine.orchestrator.plane import Plane
from engine.run.folder import RunFolder
from engine.run.trace import Trace
from engine.types import Prompt
from engine.wire.columns import pack_group
from engine.wire.messages import EndOfStep, Lease, PutPrompts, Ready, StillWaiting, Window
from support.groups import numbered_group

PROMPT = Prompt("id", "1+1=", "2", (1, 2, 3))
LIMIT_S = 0.4


def row(index):
    return pack_group(numbered_group(index))


class Rollouts:
    """What a plane needs of a service: rows come when the test puts them."""

    def __init__(self):
        self.pool = SimpleNamespace(size=1, serving=1, failure=None, members=list, check_arrivals=lambda check: None)
        self.producer = self
        self.come = asyncio.Queue()

    async def run(self, step, prompts, put, sampled=None):
        for _ in prompts:
            if (index := await self.come.get()) is None:
                return  # a mistake of ours: it ends with groups missing
            await put(row(index))


@pytest.fixture
def conduct(tmp_path, tiny_model):
    """A plane of a trainer of two replica groups whose step of so many groups has begun, and where its groups come
    from."""

    async def begin(groups, store=None, stages=None, trains=True, weights=None, **train):
        config = Config(
            model={"path": str(tiny_model)},
            parallel={"data": 2},
            rollout={"timeout_s": 1.2},
            stages=stages or {},
            weights=weights or {},
            train={"prompts_per_step": groups, "timeout_s": LIMIT_S, **train},
        )
        loader = PromptLoader([PROMPT] * groups, 0, groups)
        rollouts = Rollouts()
        plane = Plane(
            config=config,
            folder=RunFolder(tmp_path),
            trace=Trace(tmp_path / "trace", "orchestrator"),
            loader=loader,
            service=rollouts,
            store=store,
            trains=trains,
        )
        await plane.answer(ready(0))
        plane._publishing.version = 0
        await plane.answer(PutPrompts(step=0))
        return plane, rollouts.come

    return begin


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
