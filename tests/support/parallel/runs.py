"""Several runs in the same processes: trainer ranks, instance and verifier start once, the rest is as the orchestrator
does it.

Starting the processes of a run takes far longer than twenty steps of a tiny model. Every run has its own plane,
server, models, optimizer and run folder; the instance gets version 0 anew with each run's first weight sync.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgpack
from torch.distributed import TCPStore

from engine.config import Config
from engine.data.loader import PromptLoader
from engine.data.problems import read_problems
from engine.data.prompts import encode_problems
from engine.orchestrator.plane import Plane
from engine.orchestrator.rollout_service import rollout_service
from engine.orchestrator.server import Server
from engine.run.folder import RunFolder
from engine.run.trace import Trace
from engine.wire.access_token import VARIABLE, write_token
from support.parallel.two_ranks import rank_environment

RANKS_TOKEN = "ranks.token"
"""File in the run folder with the token of the ranks, which a real run gives them in their environment."""
RANK = Path(__file__).with_name("runs_rank.py")


@dataclass(frozen=True)
class Job:
    """A run; with `replay` one of that run's record."""

    config: Config
    replay: str = ""

    @property
    def folder(self) -> Path:
        return self.config.folder

    @property
    def record(self) -> str:
        return str(self.folder.parent / self.replay / "record.msgpack") if self.replay else ""


def run(jobs: list[Job], timeout_s: float, rank: Sequence[str] = (sys.executable, "-W", "ignore", str(RANK))) -> None:
    """Do all jobs in turn. They must agree in everything that ranks, instance and verifier are started with.

    `rank`: the command of a trainer rank; the file with the jobs becomes its last argument.
    """
    asyncio.run(_run(jobs, time.monotonic() + timeout_s, rank))


async def _run(jobs: list[Job], deadline: float, rank: Sequence[str]) -> None:
    config = jobs[0].config
    place = jobs[0].folder.parent
    model = Path(config.model.path)
    group_size = config.rollout.group_size
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # where the ranks meet
    ranks = _start(jobs, place, store.port, rank)
    trace = Trace(place / "trace", "orchestrator")
    try:
        async with rollout_service(
            config=config,
            model=model,
            folder=place,
            settings=config.rollout,
            group_size=group_size,
            trace=trace,
            synced=True,
        ) as service:
            encoded = encode_problems(
                read_problems(config.data.sets[0].path),
                service.tokenizer,
                config.data,
                config.rollout.max_context,
            )
            loader = PromptLoader(encoded.prompts, config.run.seed, config.train.prompts_per_step)
            await service.pool.connect_instances()
            for job in jobs:
                folder = RunFolder(job.folder)
                rollouts = () if job.replay else (loader, service)
                plane = Plane(job.config, folder, Trace(folder.trace, "orchestrator"), *rollouts)
                await _watch(job=job, plane=plane, ranks=ranks, place=place, deadline=deadline)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


async def _watch(job: Job, plane: Plane, ranks: list[subprocess.Popen], place: Path, deadline: float) -> None:
    server = Server(job.config)
    async with server.listening(job.folder):
        write_token(job.folder / RANKS_TOKEN, server.environment[VARIABLE])
        server.serve(plane)
        try:
            while not all((job.folder / f"done-{rank}").exists() for rank in range(len(ranks))):
                await plane.check_run()
                said = "\n".join(
                    f"rank {path.stem}: {path.read_text()[-2500:]}" for path in sorted(place.glob("rank-*.log"))
                )
                assert time.monotonic() < deadline, f"{job.config.run.name} did not end in time\n{said}"
                assert not any(process.poll() for process in ranks), f"{job.config.run.name}: a rank ended\n{said}"
                if server.bug.done():
                    server.bug.result()
                if plane.failure is not None:
                    raise plane.failure
                await asyncio.sleep(0.05)
        finally:
            await plane.close()


def _start(jobs: list[Job], place: Path, port: int, command: Sequence[str]) -> list[subprocess.Popen]:
    for job in jobs:
        RunFolder(job.folder).create(job.config, resume=False)
    what = [[str(job.folder), job.record] for job in jobs]
    (place / "jobs.msgpack").write_bytes(msgpack.packb(what))
    ranks = []
    world = jobs[0].config.parallel.ranks
    for rank in range(world):
        log = (place / f"rank-{rank}.log").open("w")
        jobs_file = str(place / "jobs.msgpack")
        env = rank_environment(rank, world, port, local=rank)
        ranks.append(subprocess.Popen([*command, jobs_file], env=env, stdout=log, stderr=subprocess.STDOUT))
    return ranks
