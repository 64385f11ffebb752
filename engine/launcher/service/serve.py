"""The service: the launcher with its instances and verifiers, but without our trainer (docs/service.md).

`python -m engine.launcher.service.serve --config FILE`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from aiohttp import web

from engine.config import Config, Parallel
from engine.config.recipe import load
from engine.data.loader import PromptLoader
from engine.data.prepared import training_problems
from engine.data.prompts import encode
from engine.errors import BadInput, MetronomeError
from engine.launcher.checks import check_instances, check_rollouts
from engine.launcher.http_server import listen, listen_address
from engine.launcher.pool.joining import serve_joining
from engine.launcher.rollout_service import RolloutService, rollout_service
from engine.launcher.service.desk import ServiceDesk
from engine.launcher.service.routes import ServiceRoutes
from engine.launcher.weight_sync.place import weights_folder
from engine.run.files import write_atomically
from engine.run.folder import RunFolder
from engine.run.lock import hold_lock
from engine.run.logs import kept_small
from engine.run.open_files import raise_limit
from engine.run.process import drop_lifeline, hold_lifeline, watch_lifeline
from engine.run.trace import Trace
from engine.wire.access_token import access_token
from engine.wire.address import bracketed, reachable
from engine.wire.service_messages import SERVICE_FILE

KEY = "service.listen"

Say = Callable[[str], None]


def serve(config: Config, say: Say) -> None:
    """Serve until SIGTERM or SIGINT. `config.model.path` must be a local folder; `say` is told the address.

    Raises BadInput for a recipe that the service does not take, and the error that ended it. No process is left behind.
    """
    config = checked(config)
    folder = RunFolder(config.folder)
    with hold_lock(folder.launcher_lock, f"run folder {folder.path}", 0.0):
        if folder.steps.exists():
            raise BadInput(f"run folder {folder.path} is that of a training run; give another --set run.name=NAME")
        folder.create(config, resume=folder.config.exists())
        try:
            asyncio.run(_serve(config, folder, say))
        except MetronomeError as error:
            folder.fail(error)
            raise
        finally:
            drop_lifeline()


def checked(config: Config) -> Config:
    """The config without a layout of our own trainer. Raises BadInput for what the service does not take."""
    listen_address(config.service.listen, KEY)
    listen_address(config.rollout.listen)
    for refused, key, why in (
        (config.algorithm.dynamic_sampling, "algorithm.dynamic_sampling", "the trainer chooses among its groups"),
        (config.weights.staged, "weights.staged", "a weight sync ends when every instance has verified the version"),
        (config.train.score_early, "train.score_early", "the service leases whole groups"),
        (config.queue.store != "launcher", "queue.store", "it keeps groups in its own memory (service.max_mib)"),
        (config.evaluate.every > 0, "evaluate.every", "evaluate the saved policy with `metronome evaluate`"),
    ):
        if refused:
            raise BadInput(f"{key}: the service does not have it, because {why}; switch it off")
    check_instances(config)
    config = config.model_copy(update={"parallel": Parallel()})
    check_rollouts(config)
    return config


async def _serve(config: Config, folder: RunFolder, say: Say) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    weights = weights_folder(config, Path(hold_lifeline()).parent, folder.path)
    trace = Trace(folder.trace, "launcher")
    problems = await asyncio.to_thread(training_problems, config)
    async with (
        kept_small(folder.logs),
        rollout_service(
            config=config,
            model=Path(config.model.path),
            folder=folder.path,
            settings=config.rollout,
            group_size=config.rollout.group_size,
            trace=trace,
            synced=True,
        ) as service,
        serve_joining(service.pool, config, folder.path),
    ):
        tokenizer = service.tokenizer
        encoded = await asyncio.to_thread(
            lambda: encode(
                problems,
                tokenizer.hf,
                config.data.prompt_template,
                config.rollout.max_context,
                vocabulary=tokenizer.vocabulary(),
            )
        )
        loader = PromptLoader(encoded.prompts, config.run.seed, config.train.prompts_per_step)
        if await _ends_first(stopped, service):
            return
        desk = ServiceDesk(config=config, trace=trace, loader=loader, service=service, weights=weights)
        try:
            async with _answering(desk, config, folder.path) as address:
                say(f"the service answers at {address}")
                await _until_end(desk, stopped)
        finally:
            await desk.close()


async def _ends_first(stopped: asyncio.Event, service: RolloutService) -> bool:
    """Wait for the instances; return True if a signal came before."""
    connecting = asyncio.create_task(service.pool.connect())
    ending = asyncio.create_task(stopped.wait())
    await asyncio.wait([connecting, ending], return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    if connecting.done():
        connecting.result()
        return False
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
    return True


async def _until_end(desk: ServiceDesk, stopped: asyncio.Event) -> None:
    while not stopped.is_set():
        await desk.check()
        if desk.failure is not None:
            raise desk.failure
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), 0.1)


@contextlib.asynccontextmanager
async def _answering(desk: ServiceDesk, config: Config, folder: Path) -> AsyncIterator[str]:
    """Answer on service.listen within the block; the address is yielded, and in <folder>/service.address."""
    host, _ = listen_address(config.service.listen, KEY)
    routes = ServiceRoutes(desk, access_token(), config.service.max_mib * 2**20)
    file = folder / SERVICE_FILE
    runner = web.AppRunner(routes.application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    server = await listen(runner, config.service.listen, KEY, config.transfer_timeout_s)
    address = f"{bracketed(reachable(host))}:{server.sockets[0].getsockname()[1]}"
    try:
        write_atomically(file, f"{address}\n")
        yield address
    finally:
        server.close()
        file.unlink(missing_ok=True)
        await runner.cleanup()


def main() -> int:
    """Run the command line and return the exit code: 0, 1 on failure, 2 on bad input."""
    watch_lifeline()
    raise_limit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    try:
        serve(load(parser.parse_args().config), lambda text: print(text, flush=True))
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except MetronomeError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
