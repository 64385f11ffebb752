"""Instances, verifiers and producer together, for training and for evaluation alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.config import Config, Evaluate, Rollout
from engine.data.tokens import Tokens
from engine.launcher.pool.client import Sampling
from engine.launcher.pool.keeper import Keeper
from engine.launcher.pool.pool import Pool
from engine.launcher.producer import Producer
from engine.launcher.workers import VerifierPool
from engine.run.trace import Trace


@dataclass(frozen=True)
class Service:
    """What is needed to generate and score groups."""

    pool: Pool
    producer: Producer
    tokens: Tokens
    verifier: VerifierPool


@asynccontextmanager
async def rollout_service(
    config: Config, model: Path, folder: Path, settings: Rollout | Evaluate, group_size: int, trace: Trace, synced: bool = False,
    joined: bool = False,
) -> AsyncIterator[Service]:  # fmt: skip
    """Start instances and verifiers, load the tokenizer meanwhile; end all when the body is left, however.

    `settings` say how responses are sampled. With `synced` (training) instances serve once they were given weights, else
    (evaluation) what is on disk. The recipe may declare none where others join, in training or with `joined`; else at least one
    is started. They may still be loading when the body is entered: `pool.connect()` waits for them.
    """
    pool = Pool(config, model, folder, Keeper, trace, synced)
    reward = config.reward
    log = folder / "logs" / "verifier.log"
    verifier = VerifierPool(reward.function, reward.workers, reward.timeout_s, reward.on_error, log=log)
    try:
        pool.spawn(config.rollout.instances if synced or joined else max(1, config.rollout.instances))
        tokens, _ = await asyncio.gather(asyncio.to_thread(Tokens, model), verifier.start())
        stop = tokens.stop_ids(config.rollout.stop)
        partial = synced and config.rollout.partial
        sampling = Sampling(settings.max_new_tokens, settings.temperature, settings.top_p, settings.top_k, stop, partial)
        producer = Producer(pool, verifier, tokens.decode, sampling, group_size, config.run.seed, trace)
        yield Service(pool, producer, tokens, verifier)
    finally:
        verifier.close()
        await pool.close()
        trace.flush()
