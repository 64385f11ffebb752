"""Starts what the plane of a run needs: instances, verifiers, the column store and the prompts."""

from __future__ import annotations

import asyncio
import gc
import shlex
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from engine.config import Config
from engine.data.loader import PromptLoader, load_prompts
from engine.data.problems import Problems
from engine.data.prompts import encode_problems
from engine.data.tokenizer import Tokenizer
from engine.orchestrator.column_store import starting_store
from engine.orchestrator.plane import Plane
from engine.orchestrator.rollout_service import rollout_service
from engine.orchestrator.run_events import RunEvents
from engine.orchestrator.server import Server
from engine.run.folder import RunFolder
from engine.run.run_file import read_run
from engine.run.trace import Trace
from engine.wire.access_token import is_loopback
from engine.wire.address import ADDRESS_FILE, split_address


@asynccontextmanager
async def serving_plane(
    config: Config,
    folder: RunFolder,
    trace: Trace,
    problems: Problems,
    server: Server,
    weights: Path,
    notices: RunEvents | None = None,
    trains: bool = True,
) -> AsyncIterator[Plane]:
    """Start instances, verifiers and store at the same time, since each takes seconds. Create the plane once the
    instances serve, and stop everything when the `async with` body ends. `notices`: receives what the user should
    see. `trains`: whether the trainer is ours."""
    async with (
        rollout_service(
            config=config,
            model=Path(config.model.path),
            folder=folder.path,
            settings=config.rollout,
            group_size=config.rollout.group_size,
            trace=trace,
            synced=True,
            notices=notices,
            how_to_join=how_to_join(config, folder),
            needed=lambda: not trains or (server.plane is not None and server.plane.is_ready),
        ) as service,
        starting_store(config, folder.path) as store,
    ):
        server.serve_pool(service.pool)
        loader = await asyncio.to_thread(prompt_loader, config, problems, service.tokenizer)
        await service.pool.connect_instances()
        plane = Plane(
            config=config,
            folder=folder,
            trace=trace,
            loader=loader,
            service=service,
            store=await store,
            weights=weights,
            trains=trains,
        )
        gc.freeze()  # loaded objects stay, so the collector need not go through them (0.1 s each time)
        yield plane


def how_to_join(config: Config, folder: RunFolder) -> str:
    """Return the command that starts an instance which joins a run whose server is listening: on this node, or on any
    other if rollout.listen is not loopback."""
    address = (folder.path / ADDRESS_FILE).read_text().strip()
    if is_loopback(split_address(config.rollout.listen, "rollout.listen")[0]):
        return shlex.join(["metronome", "serve", str(folder.config), "--join", str(folder.path)])
    there = ["--join", address, "--host", "ADDRESS_OF_ITS_NODE"]
    return shlex.join(["metronome", "serve", str(folder.config), *there])


def prompt_loader(config: Config, problems: Problems, tokenizer: Tokenizer) -> PromptLoader:
    """Encode the problems, and return their loader, whose fingerprint is computed."""
    began = read_run(config.folder).began_at
    encoded = encode_problems(problems, tokenizer, config.data, config.rollout.max_context, clock=began)
    loader = load_prompts(encoded, config)
    _ = loader.fingerprint  # here in a thread, because it takes seconds for many prompts
    return loader


def weights_folder(config: Config, scratch: Path, run_folder: Path) -> Path:
    """Return the folder for weights on their way to the instances, with transport "file".

    The folder is in `scratch`, the lifeline's folder (in shared memory if available), if that has free space for two
    versions and the run has one node. Otherwise it is in the run folder.
    """
    needed = sum(path.stat().st_size for path in Path(config.model.path).glob("*.safetensors"))
    roomy = config.parallel.nodes == 1 and shutil.disk_usage(scratch).free > 2 * needed
    return (scratch if roomy else run_folder) / "weights"
