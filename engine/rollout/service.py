"""Instances, verifiers and producer together, for training and for evaluation alike."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from engine.config import Config
from engine.reward.workers import VerifierPool
from engine.rollout.client import Sampling
from engine.rollout.pool import Pool
from engine.rollout.producer import Producer
from engine.rollout.tokens import Tokens
from engine.trace import Trace


@asynccontextmanager
async def rollout_service(
    config: Config, model: Path, folder: Path, tokens: Tokens, sampling: Sampling, group_size: int, trace: Trace
) -> AsyncIterator[tuple[Pool, Producer]]:
    """Start instances and verifiers; end them when the body is left, however.

    The instances may still be loading when the body is entered: `pool.connect()` waits for them.
    """
    pool = Pool(config, model, folder)
    reward = config.reward
    log = folder / "logs" / "verifier.log"
    verifier = VerifierPool(reward.function, reward.workers, reward.timeout_s, reward.on_error, log=log)
    try:
        pool.spawn()
        await verifier.start()
        yield pool, Producer(pool, verifier, tokens.decode, sampling, group_size, config.run.seed, trace)
    finally:
        verifier.close()
        await pool.close()
        trace.flush()
