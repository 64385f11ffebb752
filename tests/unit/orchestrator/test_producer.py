"""When a group gives up on instances that refuse it. The pool is reduced to one place."""

import asyncio
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from engine.config import Config
from engine.data.loader import sampling_seed
from engine.errors import DeadlineError, MetronomeError
from engine.orchestrator import producer
from engine.orchestrator.pool.instance_client import Busy, InstanceFault, SamplingSettings
from engine.orchestrator.producer import Producer
from engine.types import Prompt, Score
from engine.wire.columns import PackedResponse, open_prompt, pack_ids

LIMIT_S = 0.3


class World:
    """One instance with room for one group, and what the producer asks for besides; `refusals` by prompt."""

    per_response = False
    synced = False
    size = 1
    config = Config(rollout={"timeout_s": LIMIT_S, "concurrency": 1})

    def __init__(self, refusals, takes_s=0.0):
        self.refusals = refusals
        self.takes_s = takes_s
        self.seeds = []
        self.place = asyncio.Lock()
        self.instance = SimpleNamespace(client=self, name="i", responses=1, record_group=lambda *figures: None)
        self.groups = []

    @asynccontextmanager
    async def borrow(self, avoid=(), first=False, least=None, size=0):
        async with self.place:
            yield SimpleNamespace(instance=self.instance, trial=False)

    async def complete(self, prompt, sampling, seed, so_far):
        if self.refusals.get(prompt.id, 0):
            self.refusals[prompt.id] -= 1
            raise Busy("paused")
        self.seeds.append(seed)
        await asyncio.sleep(self.takes_s)
        return PackedResponse(
            token_ids=pack_ids([1]),
            logprobs=bytes(4),
            versions=((0, 0),),
            loss_mask=b"\x01",
            finish_reason="stop",
            seed=seed,
            instance="i",
        )

    def record_success(self, instance):
        pass

    free_slot = record_success

    async def score(self, prompt, responses):
        return [Score(1.0)] * len(responses)

    def add_span(self, *span, **fields):
        pass

    async def put(self, group):
        self.groups.append(open_prompt(group).id)

    async def run(self, *prompts, epoch=0):
        made = Producer(
            pool=self,
            verifier=self,
            sampling=SamplingSettings(max_new_tokens=8, temperature=1.0, top_p=1.0, top_k=0, vocabulary=1000),
            group_size=1,
            seed=0,
            trace=self,
        )
        async with asyncio.timeout(10):
            await made.run(0, [(epoch, Prompt(name, "", "", (1, 2))) for name in prompts], self.put)


async def test_the_same_prompt_is_sampled_anew_in_every_epoch():
    world = World({})
    for epoch in range(3):
        await world.run("a", epoch=epoch)
    assert world.seeds == [sampling_seed(0, epoch, "a", 0) for epoch in range(3)]
    assert len(set(world.seeds)) == 3


async def test_a_group_that_waited_long_for_its_place_may_meet_a_paused_instance_once(monkeypatch):
    monkeypatch.setattr(producer, "BUSY_S", 0.01)
    world = World({"b": 1, "c": 2}, takes_s=LIMIT_S)  # each of the others takes as long as the limit
    await world.run("a", "b", "c")
    assert sorted(world.groups) == ["a", "b", "c"]


async def test_a_group_that_meets_nothing_but_paused_instances_fails_by_name(monkeypatch):
    monkeypatch.setattr(producer, "BUSY_S", 0.01)
    began = time.monotonic()
    with pytest.raises(DeadlineError, match=r"response 0 to prompt a found no instance that takes it in 0.3 s: paused"):
        await World({"a": 10**6}).run("a")
    assert time.monotonic() - began >= LIMIT_S


class Failing(World):
    """Its instance fails on every request."""

    def record_failure(self, place, reason):
        assert "out of memory" in reason

    async def complete(self, prompt, sampling, seed, so_far):
        raise InstanceFault("500: out of memory")


async def test_a_response_on_which_every_instance_fails_ends_the_run_by_name():
    said = f"step 0, generating: response 0 to prompt a failed {producer.FAULTS} times; last error: 500: out of memory"
    with pytest.raises(MetronomeError, match=said):
        await Failing({}).run("a")
