"""`python -m engine.instance.embedded`: one rollout instance with the embedded engine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import BadInput, MetronomeError, ProcessDied
from engine.run.process import bind, watch_lifeline
from engine.wire.access_token import access_token, check_address

if TYPE_CHECKING:  # torch reads its environment when it is imported, so main() imports it after setting that
    from aiohttp import web

    from engine.instance.embedded.engine import Engine


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Exit code 0 then, 2 on bad input, 1 on failure."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the event loop takes over, while the model loads
    watch_lifeline()
    try:
        _check(options)
        bind(options.cores)
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
        asyncio.run(_serve(options))
    except MetronomeError as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadInput) else 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.instance.embedded", description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; others than loopback need METRONOME_TOKEN"
    )
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--port-file", type=Path, help="where to write host, port and pid, as JSON, when ready")
    parser.add_argument("--name", default="instance-0", help="name of this instance in messages")
    parser.add_argument("--slots", type=int, default=32, help="responses decoded at the same time")
    parser.add_argument("--max-context", type=int, default=2048, help="prompt and response tokens together")
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    parser.add_argument(
        "--open-requests", type=int, default=4096, help="completions waiting or running; more are answered 429"
    )
    parser.add_argument(
        "--read-timeout", type=float, default=60.0, help="seconds a client may take to send a request's body"
    )
    parser.add_argument("--cores", type=_cores, default=[], help="comma-separated CPU cores to stay on")
    parser.add_argument(
        "--deterministic", action="store_true", help="a response depends on prompt, seed and weights only"
    )
    return parser


def _cores(text: str) -> list[int]:
    return [int(core) for core in text.split(",")]


def _check(options: argparse.Namespace) -> None:
    check_address(options.host, access_token())
    for key, least in (
        ("slots", 1),
        ("threads", 1),
        ("max_context", 2),
        ("port", 0),
        ("open_requests", 1),
        ("read_timeout", 1),
    ):
        if getattr(options, key) < least:
            raise BadInput(f"--{key.replace('_', '-')} {getattr(options, key)}: must be at least {least}")
    if options.port_file is not None and not options.port_file.parent.is_dir():
        raise BadInput(f"--port-file {options.port_file}: there is no folder {options.port_file.parent}")
    missing = set(options.cores) - os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if missing:
        raise BadInput(f"--cores: this process may not use {sorted(missing)}, only {sorted(os.sched_getaffinity(0))}")


async def _serve(options: argparse.Namespace) -> None:
    from engine.instance.embedded.app import Routes
    from engine.instance.embedded.engine_thread import EngineThread
    from engine.instance.embedded.security import Guard
    from engine.instance.protocol import RequestLimits

    engine = _engine(options)
    asked = asyncio.Event()
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    limits = RequestLimits(engine.model.vocabulary, options.max_context, engine.model.stop_ids)
    worker = EngineThread(engine, loop, ended.set)
    worker.start()
    # prompt and stop tokens
    guard = Guard(
        access_token(), options.max_context + engine.model.vocabulary, options.open_requests, options.read_timeout
    )
    app = Routes(worker, limits, options.model, guard).application()
    async with _listening(app, options.host, options.port) as port:
        _announce(options, port)
        await asyncio.wait(
            [asyncio.ensure_future(event.wait()) for event in (asked, ended)], return_when=asyncio.FIRST_COMPLETED
        )
        if ended.is_set():
            raise ProcessDied("the engine's thread ended by the error above")
        worker.stop()


def _engine(options: argparse.Namespace) -> Engine:
    """The engine with its model loaded and one response sampled, so that no request pays for first-time set-up."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from engine.instance.embedded.engine import Engine, Request
    from engine.instance.embedded.rollout_model import RolloutModel
    from engine.instance.embedded.sampling import Sampling

    disable_progress_bar()
    torch.set_num_threads(options.threads)
    torch.set_num_interop_threads(1)
    torch.set_grad_enabled(False)
    engine = Engine(
        RolloutModel(options.model, options.max_context), options.slots, options.max_context, options.deterministic
    )
    engine.submit(Request((0,), Sampling(max_tokens=min(2, options.max_context - 1)), lambda result: None))
    while engine.busy:
        engine.step()
    engine.prompts.clear()
    return engine


@contextlib.asynccontextmanager
async def _listening(app: web.Application, host: str, port: int) -> AsyncIterator[int]:
    """Serve within the block; gives the port. Requests still open at the end are cut off."""
    from aiohttp import web

    from engine.instance.embedded.security import ClientFaults

    logging.getLogger("aiohttp.server").addFilter(ClientFaults())
    # lingering: how long the rest of a body that was refused is thrown away before the connection ends
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1, lingering_time=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise BadInput(f"--host {host} --port {port}: {error.strerror}") from None
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _announce(options: argparse.Namespace, port: int) -> None:
    """Write the port file whole or not at all."""
    print(f"{options.name}: serving {options.model} on http://{options.host}:{port}", flush=True)
    if options.port_file is not None:
        partial = options.port_file.with_name(options.port_file.name + ".partial")
        partial.write_text(json.dumps({"host": options.host, "port": port, "pid": os.getpid()}))
        partial.replace(options.port_file)


if __name__ == "__main__":
    sys.exit(main())
