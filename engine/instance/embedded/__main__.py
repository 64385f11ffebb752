"""`python -m engine.instance.embedded`: runs one rollout instance with the embedded engine."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ProcessDied
from engine.instance import command_line
from engine.run.process import bind_cores, watch_lifeline
from engine.wire.connections import log_loop_error

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""Variable with which torch asks Linux for pages of 2 MiB for the memory of large tensors. A decoding step reads all
weights, and so finds their addresses in fewer look-ups."""

if TYPE_CHECKING:  # torch reads its environment variables at import, so they must be set first
    from engine.instance.embedded.engine import Engine


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, then return 0. Return 2 on bad input, 1 on failure."""
    parser = command_line.make_parser("engine.instance.embedded", __doc__)
    parser.add_argument(
        "--conversations",
        action="store_true",
        help="keep the keys and values of as many prompts as there are slots, for prompts that continue them",
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the event loop takes over, while the model loads
    watch_lifeline()
    return command_line.run_command(options, _run)


def _run(options: argparse.Namespace) -> None:
    command_line.check_options(options)
    command_line.ensure_token(options)
    bind_cores(options.cores)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ.setdefault(HUGE_PAGES, "1")
    asyncio.run(_serve(options))


async def _serve(options: argparse.Namespace) -> None:
    from engine.data.tokenizer import Tokenizer
    from engine.instance.embedded.backend import EmbeddedBackend, EngineThread
    from engine.instance.embedded.server import EngineServer
    from engine.instance.embedded.text_routes import EmbeddedText
    from engine.instance.http import InstanceApp
    from engine.instance.protocol import RequestLimits

    sock = command_line.bind_socket(options)
    tokenizer = Tokenizer(Path(options.model)) if options.text else None
    engine = _warm_engine(options)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(log_loop_error)
    limits = RequestLimits(engine.model.vocabulary, options.max_context, engine.model.stop_ids)
    ended = asyncio.Event()
    worker = EngineThread(engine, loop, ended.set)
    backend = EmbeddedBackend(
        worker, limits, options.model, options.profile / options.name if options.profile is not None else None
    )
    text = EmbeddedText(backend, tokenizer, options.text) if tokenizer is not None else None
    server = EngineServer(
        InstanceApp(
            backend=backend,
            open_requests=options.open_requests,
            read_s=options.read_timeout,
            text=text,
            policy_version=options.policy_version,
        )
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.end)
    worker.start()
    sock.listen()
    command_line.announce_address(options, sock.getsockname()[1])
    serving = asyncio.create_task(server.serve([sock]))
    await asyncio.wait([serving, asyncio.ensure_future(ended.wait())], return_when=asyncio.FIRST_COMPLETED)
    server.end()
    await serving
    backend.close()  # a running broadcast would keep the process alive until its deadline
    if ended.is_set():
        raise ProcessDied("the engine's thread ended; the error above says why")
    worker.stop()


def _warm_engine(options: argparse.Namespace) -> Engine:
    """Return the engine with its model loaded. It has already sampled one response, so that no request pays for
    first-time set-up."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from engine.instance.embedded.engine import Engine, SamplingRequest
    from engine.instance.embedded.rollout_model import RolloutModel
    from engine.instance.protocol import Sampling

    disable_progress_bar()
    torch.set_num_threads(options.threads)
    torch.set_num_interop_threads(1)
    torch.set_grad_enabled(False)
    model = RolloutModel(options.model, options.max_context, getattr(torch, options.dtype))
    engine = Engine(
        model=model,
        slots=options.slots,
        max_context=options.max_context,
        deterministic=options.deterministic,
        conversations=options.conversations,
    )
    engine.submit(SamplingRequest((0,), Sampling(max_tokens=min(2, options.max_context - 1)), lambda result: None))
    while engine.busy:
        engine.step()
    engine.prompts.drop_prompts()
    return engine


if __name__ == "__main__":
    sys.exit(main())
