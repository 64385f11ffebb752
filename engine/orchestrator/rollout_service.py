"""The instances, the verifiers and the producer of a run or an evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.config import Config, Evaluate, Rollout
from engine.data.tokenizer import Tokenizer
from engine.orchestrator.pool.health import HealthMonitor
from engine.orchestrator.pool.instance_client import SamplingSettings
from engine.orchestrator.pool.pool import Pool
from engine.orchestrator.producer import Producer
from engine.orchestrator.run_events import RunEvents
from engine.orchestrator.workers.program_pool import ProgramPool
from engine.orchestrator.workers.verifier_pool import VerifierPool
from engine.run.run_inputs import kept_code
from engine.run.trace import Trace
from engine.schedule import Schedule


@dataclass(frozen=True)
class RolloutService:
    """The parts that generate and score groups."""

    pool: Pool
    producer: Producer
    tokenizer: Tokenizer
    verifier: VerifierPool
    notices: RunEvents
    programs: ProgramPool | None = None


@asynccontextmanager
async def rollout_service(
    config: Config,
    model: Path,
    folder: Path,
    settings: Rollout | Evaluate,
    group_size: int,
    trace: Trace,
    synced: bool = False,
    joined: bool = False,
    notices: RunEvents | None = None,
    how_to_join: str = "",
    needed: Callable[[], bool] = lambda: True,
) -> AsyncIterator[RolloutService]:
    """Start instances and verifiers while the tokenizer loads. Stop them all when the `async with` body ends or fails.

    `settings`: how responses are sampled. `synced`: training, where instances serve once they have received weights;
    without it (evaluation) they serve the model that they load from disk. In training, or with `joined`, the recipe may
    declare no instances, since others can join. In all other cases at least one is started. Instances may still be
    loading when the body begins: `pool.connect_instances()` waits for them.
    """
    notices = notices or RunEvents()
    pool = Pool(
        config=config,
        model=model,
        folder=folder,
        trace=trace,
        synced=synced,
        notices=notices,
        how_to_join=how_to_join,
        needed=needed,
    )
    code = kept_code(folder, config, "reward")
    verifier = VerifierPool(config.reward, folder / "logs" / "verifier.log")
    programs = ProgramPool(config, folder / "logs" / "program.log") if config.rollout.program else None
    try:
        async with HealthMonitor(pool):
            pool.spawn(config.rollout.instances if synced or joined else max(1, config.rollout.instances))
            data = config.data
            written = (data.prompt_template, data.chat_template_kwargs)
            tokenizer = await asyncio.to_thread(Tokenizer, model, config.rollout.stop, *written)
            tokenizer.for_verifiers.code = str(code or "")
            await verifier.start(tokenizer.for_verifiers)
            if programs is not None:
                await programs.start(tokenizer.for_verifiers)
            partial = synced and config.rollout.partial
            mixed = synced and not Schedule.of(config.train, config.rollout.partial).exact
            producer = Producer(
                pool=pool,
                verifier=verifier,
                sampling=SamplingSettings.of(
                    settings=settings,
                    model=model,
                    stop=tokenizer.stop_ids,
                    partial=partial,
                    mixed=mixed,
                    routes=synced and config.algorithm.routing_replay,
                    seeded=not synced or config.rollout.seeded,
                ),
                group_size=group_size,
                seed=config.run.seed,
                trace=trace,
                notices=notices,
                programs=programs,
                mask_truncated=config.algorithm.mask_truncated,
            )
            yield RolloutService(
                pool=pool,
                producer=producer,
                tokenizer=tokenizer,
                verifier=verifier,
                notices=notices,
                programs=programs,
            )
    finally:
        if programs is not None:
            programs.close()
        verifier.close()
        await pool.close()
        trace.flush()
