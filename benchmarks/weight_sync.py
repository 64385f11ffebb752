"""Measures a weight sync, from the last applied gradient until all instances serve the new version, beside a bare
transfer.

`python benchmarks/weight_sync.py [--tiny | --model FOLDER]` publishes a random model of Qwen3-0.6B's shape (fp32, tied)
from one trainer rank to embedded instances in processes of their own, over each transport to 1 and 2 instances. It uses
the trainer's publisher and the orchestrator's handlers. `sync_s` ends when all instances serve the version, with every
byte checked. `verify_s` is the comparison of the fixed tokens, which follows while they generate (their responses wait
for it). The instances compute theirs within `sync_s`; `--check-tokens 0` leaves that out. In turn with every sync, the
same bytes in buckets of the same sizes are moved by a bare transfer: gloo by broadcast, file by writing and reading.
"Staged" measures the same while the instance generates, and the share of the sync in which it generates.

`bound` is the smallest ratio that a sync with these checks can have on this machine's cores. It is the CPU seconds of
the bare transfer on all ends plus a checksum of every byte on each end (`checks_s`), spread evenly over the cores, over
the time of the bare transfer. `sync_cpu_s` and `bare_cpu_s` are CPU seconds on all ends; other work on the machine
disturbs them less than seconds. Needs about 14 GiB of memory with 2 instances. Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from bare_transfer import bare_transfer
from common import CACHE, one_rank, result
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine import platform
from engine.client.connection import Connection
from engine.client.publish.publisher import Publisher
from engine.client.publish.transports import open_transport
from engine.config import Config
from engine.config.recipe import load_config
from engine.errors import MetronomeError
from engine.model.tri_model import TriModel
from engine.orchestrator.plane import Plane
from engine.orchestrator.pool.health import HealthMonitor
from engine.orchestrator.pool.pool import Pool
from engine.orchestrator.server import Server
from engine.run.folder import RunFolder
from engine.run.process import SHARED_MEMORY, drop_lifeline
from engine.run.trace import Trace
from engine.wire.access_token import VARIABLE
from engine.wire.messages import FinishSync, Message, OpenSync, Request, SendBucket
from engine.wire.rollout_messages import Complete, GetLoad, InstanceRequest, Reply
from engine.wire.weights.buckets import Buffers, bucket_span, pack_buckets
from engine.wire.weights.checksum import tensor_checksum

TIMEOUT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model of 16 million parameters, for a quick look")
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of measured syncs; another one comes first and warms up"
    )
    parser.add_argument("--model", type=Path, help="publish the weights of this Hugging Face folder")
    parser.add_argument("--check-tokens", type=int, default=16, help="weights.check_tokens")
    parser.add_argument("--transports", default="file,gloo")
    parser.add_argument("--instances", default="1,2")
    arguments = parser.parse_args()
    model = arguments.model or random_model(arguments.tiny)
    figures: dict[str, Any] = {}
    with one_rank(), tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as scratch:
        models: TriModel | None = None
        for transport in arguments.transports.split(","):
            for count in map(int, arguments.instances.split(",")):
                for staged in (False, True) if count == 1 else (False,):
                    config = configuration(
                        model=model,
                        transport=transport,
                        instances=count,
                        staged=staged,
                        check_tokens=arguments.check_tokens,
                    )
                    models = models or policy(config)
                    name = f"{transport}_{count}{'_staged' if staged else ''}"
                    figures[name] = measure(config, models, Path(scratch) / name, arguments.rounds)
                    print(name, json.dumps(figures[name]), flush=True)
                    shutil.rmtree(Path(scratch) / name)
    drop_lifeline()
    result({"parameters": sum(tensor.numel() for tensor in models.policy.parameters()) if models else 0, **figures})


def random_model(tiny: bool) -> Path:
    """A random model's folder, cached in runs/."""
    sizes = (
        {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 768, "vocab_size": 40000}
        if tiny
        else {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072, "vocab_size": 151936}
    )
    folder = CACHE / "models" / f"random-qwen3-{'tiny' if tiny else '0.6b'}"
    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        config = Qwen3Config(
            **sizes,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=None,
        )
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def configuration(model: Path, transport: str, instances: int, staged: bool, check_tokens: int = 16) -> Config:
    return load_config(
        None,
        [
            f"model.path={model}",
            "algorithm.old_policy=behavior",
            "algorithm.kl_coef=0.0",
            f"rollout.instances={instances}",
            "rollout.concurrency=1",
            "rollout.group_size=2",
            "rollout.max_context=64",
            f"rollout.timeout_s={TIMEOUT_S}",
            "rollout.heartbeat_s=60",
            "rollout.wait_s=240",
            "rollout.max_new_tokens=16",
            f"weights.transport={transport}",
            f"weights.staged={str(staged).lower()}",
            f"weights.check_tokens={check_tokens}",
        ],
    )


def policy(config: Config) -> TriModel:
    from engine.trainer.ranks.models import open_models

    return open_models(config, platform.get_platform("cpu"))


def measure(config: Config, models: TriModel, folder: Path, rounds: int) -> dict[str, float]:
    """Medians in seconds of syncs and bare transfers, which take turns."""
    from engine.trainer.ranks.rank_group import RankGroup

    transport = config.weights.transport
    staged = config.weights.staged
    sizes = bucket_sizes(models, config.weights.bucket_bytes)
    bare_side = bare_transfer(
        transport=transport, sizes=sizes, count=config.rollout.instances, folder=folder, timeout_s=TIMEOUT_S
    )
    with orchestrator(config, folder) as side, bare_side as (bare, pids):
        plane = Connection(side.url, side.key, "trainer", TIMEOUT_S)
        try:
            publisher = Publisher(
                connection=plane,
                ranks=RankGroup(1, TIMEOUT_S),
                transport=open_transport(transport, TIMEOUT_S, torch.device("cpu"), folder / "weights"),
                dtype=torch.float32,
                bucket_bytes=config.weights.bucket_bytes,
                timeout_s=TIMEOUT_S,
            )
            first_s = publisher.publish(models, 0)
            publisher.verify(models, 0)
            checks_s = seconds_of_checks(models)
            found = [
                one_round(
                    side=side, publisher=publisher, models=models, bare=bare, pids=pids, version=version, staged=staged
                )
                for version in range(1, rounds + 2)
            ][1:]
        finally:
            plane.close()
    medians = {key: statistics.median(one[key] for one in found) for key in found[0]}
    busy_s = medians["bare_cpu_s"] + (1 + config.rollout.instances) * checks_s
    bound = max(1.0, busy_s / len(os.sched_getaffinity(0)) / medians["bare_s"])
    return {
        "GB": sum(sizes) / 1e9,
        "first_s": first_s,
        "checks_s": checks_s,
        **medians,
        "ratio": medians["sync_s"] / medians["bare_s"],
        "bound": bound,
    }


def seconds_of_checks(models: TriModel) -> float:
    """Seconds for the checksums of all tensors on one end, on one core."""
    tensors = [tensor for _, tensor in models.tensors()]
    began = time.thread_time()
    tensor_checksum(*tensors)
    return time.thread_time() - began


def one_round(
    side: Orchestrator,
    publisher: Publisher,
    models: TriModel,
    bare: Callable[[], float],
    pids: list[int],
    version: int,
    staged: bool,
) -> dict[str, float]:
    with torch.no_grad():
        for parameter in models.policy.parameters():
            parameter.mul_(1.0001)
    busy = cpu_seconds(pids)
    found = {"bare_s": bare(), "bare_cpu_s": cpu_seconds(pids) - busy}
    with side.generating() if staged else contextlib.nullcontext():
        side.seconds.clear()
        tokens = side.generated() if staged else 0
        busy = cpu_seconds(side.pids)
        found["sync_s"] = publisher.publish(models, version)
        found["sync_cpu_s"] = cpu_seconds(side.pids) - busy
        if staged:
            found["tokens_meanwhile"] = side.generated() - tokens
        found |= {
            f"{name}_s": side.seconds[request.__name__]
            for name, request in (("open", OpenSync), ("bucket", SendBucket), ("finish", FinishSync))
        }
        if staged:
            found["hidden"] = 1 - found["finish_s"] / found["sync_s"]
        began = time.perf_counter()
        publisher.verify(models, version)
        found["verify_s"] = time.perf_counter() - began
    return found


def cpu_seconds(pids: list[int]) -> float:
    """CPU seconds of this process and of `pids` so far."""
    times = [psutil.Process(pid).cpu_times() for pid in (os.getpid(), *pids)]
    return sum(one.user + one.system for one in times)


def bucket_sizes(models: TriModel, limit: int) -> list[int]:
    """Sizes of the buckets that engine.wire.weights.buckets makes."""
    buffers = Buffers(1, TIMEOUT_S)
    sizes = []
    for bucket in pack_buckets(models.tensors(), torch.float32, limit, buffers):
        sizes.append(bucket_span(bucket.specs))
        buffers.give_back(bucket.buffer)
    return sizes


# the orchestrator's side, in a thread of this process -------------------------------------------------


class Orchestrator:
    """The plane's handlers with real instances."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.url = ""
        self.key = ""
        """The token of its own ranks."""
        self.ready = threading.Event()
        self.stop = threading.Event()
        self.failure: BaseException | None = None
        self.seconds: dict[str, float] = {}
        self.pool: Pool | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        """Serve until `stop` is set."""
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - told to the main thread
            self.failure = error
        self.ready.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        (self.folder / "logs").mkdir(parents=True)
        self.pool = Pool(self.config, Path(self.config.model.path), self.folder, synced=True)
        plane = Plane(
            config=self.config,
            folder=RunFolder(self.folder),
            trace=Trace(self.folder / "trace", "orchestrator"),
            loader=SimpleNamespace(tokens=lambda: []),
            service=SimpleNamespace(pool=self.pool),
        )
        try:
            async with HealthMonitor(self.pool):
                await self._answer(plane)
        finally:
            await self.pool.close()

    async def _answer(self, plane: Plane) -> None:
        assert self.pool is not None
        self.pool.spawn(self.config.rollout.instances)
        await self.pool.connect_instances()
        server = Server(self.config)
        server.serve(SimpleNamespace(answer=self._timed(plane)))
        async with server.listening(self.folder):
            self.url = server.url
            self.key = server.environment[VARIABLE]
            self.ready.set()
            while not self.stop.is_set() and not server.bug.done():
                await asyncio.sleep(0.05)

    def _timed(self, plane: Plane) -> Callable[[Request[Any], bool], Awaitable[Message]]:
        async def timed(request: Request[Any], ours: bool) -> Message:
            began = time.perf_counter()
            try:
                return await plane.answer(request, ours)
            finally:
                name = type(request).__name__
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

        return timed

    @property
    def pids(self) -> list[int]:
        """Process ids of the instances."""
        assert self.pool is not None
        return [one.child.process.pid for one in self.pool.instances if one.child is not None]

    def _call(self, request: InstanceRequest[Reply]) -> Reply:
        assert self.pool is not None
        assert self.loop is not None
        call = self.pool.instances[0].client.call(request)
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(TIMEOUT_S)

    def generated(self) -> int:
        """Number of tokens that the first instance has generated so far."""
        return self._call(GetLoad()).generated_tokens

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Keep an instance busy with responses of 2 tokens (a pause waits for them)."""
        off = threading.Event()
        short = Complete(prompt=[1, 2, 3, 4], max_tokens=2, temperature=1.0, top_p=1.0, top_k=0, seed=0)

        def generate() -> None:
            while not off.is_set():
                self._call(short)

        thread = threading.Thread(target=generate)
        thread.start()
        try:
            yield
        finally:
            off.set()
            thread.join()


@contextmanager
def orchestrator(config: Config, folder: Path) -> Iterator[Orchestrator]:
    folder.mkdir()
    side = Orchestrator(config, folder)
    thread = threading.Thread(target=side.run)
    thread.start()
    side.ready.wait(TIMEOUT_S)
    try:
        if side.failure is not None:
            raise MetronomeError(f"the orchestrator failed: {side.failure!r}")
        yield side
    finally:
        side.stop.set()
        thread.join()


if __name__ == "__main__":
    main()
