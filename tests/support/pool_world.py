"""A pool with scripted instances, its health monitor and producer: what tests of them share."""

import asyncio
import contextlib
from collections import Counter

from engine.config import Config
from engine.data.loader import sampling_seed
from engine.orchestrator import producer
from engine.orchestrator.pool import health
from engine.orchestrator.pool.instance_client import SamplingSettings
from engine.orchestrator.pool.pool import Pool
from engine.orchestrator.producer import Producer
from engine.run.trace import Trace
from engine.types import Prompt
from engine.wire.columns import open_group
from support.scripted import Scores, Scripted, tokens_of

ROLLOUT = {"group_size": 4, "concurrency": 2, "heartbeat_s": 30, "wait_s": 30, "timeout_s": 10}
PROMPTS = [Prompt(f"p{n}", f"{n}+1=", str(n + 1), (1, 2, n + 3)) for n in range(8)]


class World:
    """A pool, and instances that join it."""

    def __init__(self, folder, stack, synced, **rollout):
        config = Config(rollout=ROLLOUT | rollout)
        self.trace = Trace(folder / "trace", "orchestrator")
        self.pool = Pool(config=config, model=folder, folder=folder, trace=self.trace, synced=synced)
        self.produce()
        self.stack = stack
        self.epoch = 0
        self.groups = []
        self.finished = []

    def produce(self, verifier=None, group_size=4, sampling=None, **more):
        """Have a producer of this verifier, by default `Scores`. `sampling`: settings that differ."""
        self.group_size = group_size
        settings = {"max_new_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "vocabulary": 1000}
        self.producer = Producer(
            pool=self.pool,
            verifier=verifier or Scores(),
            sampling=SamplingSettings(**settings | (sampling or {})),
            group_size=group_size,
            seed=0,
            trace=self.trace,
            **more,
        )

    async def join(self, name, scripted=None):
        scripted = scripted or Scripted()
        url = await self.stack.enter_async_context(scripted.serving())
        return scripted, self.pool.enter(name, url)

    async def run(self, prompts=PROMPTS, within_s=10.0):
        async def put(group):
            self.groups.append(open_group(group))

        async def on_finished(group, number):
            self.finished.append((group, number))

        async with asyncio.timeout(within_s):
            await self.producer.run(3, [(self.epoch, prompt) for prompt in prompts], put, on_finished)

    def check_complete(self, prompts=PROMPTS):
        """Every response exactly once, each what its prompt and seed make it."""
        assert sorted(group.index for group in self.groups) == list(range(len(prompts)))
        for group in self.groups:
            seeds = [sampling_seed(0, self.epoch, group.prompt.id, number) for number in range(self.group_size)]
            expected = [tokens_of(list(group.prompt.token_ids), seed) for seed in seeds]
            assert [list(response.token_ids) for response in group.responses] == expected
            assert [score.value for score in group.scores] == [float(len(tokens)) for tokens in expected]
        each = [(group, number) for group in range(len(prompts)) for number in range(self.group_size)]
        assert Counter(self.finished) == Counter(each)


def worlds(folder, monkeypatch):
    """Opens a world; closes it at the end of its block."""
    monkeypatch.setattr(health, "LOOK_S", 0.02)
    monkeypatch.setattr(health, "BACKOFF_S", 0.01)
    monkeypatch.setattr(producer, "BUSY_S", 0.02)

    @contextlib.asynccontextmanager
    async def begin(synced=False, **rollout):
        async with contextlib.AsyncExitStack() as stack:
            made = World(folder, stack, synced, **rollout)
            try:
                async with health.HealthMonitor(made.pool):
                    await made.pool.connect_instances()
                    yield made
            finally:
                await made.pool.close()

    return begin
