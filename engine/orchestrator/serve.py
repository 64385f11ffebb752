"""The service: the orchestrator with its instances and verifiers, but without our trainer (docs/service.md).

`python -m engine.orchestrator.serve --config FILE`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.config import Config, Parallel
from engine.config.recipe import load_config
from engine.data.problem_statistics import recorded_problems
from engine.errors import BadInput, MetronomeError
from engine.orchestrator.checks import check_instances, check_rollouts
from engine.orchestrator.opening import serving_plane, weights_folder
from engine.orchestrator.plane import Plane
from engine.orchestrator.scorer_process import END_S, ScorerProcess, start_scorers
from engine.orchestrator.server import Server, listen_address
from engine.run.disk import raise_limit
from engine.run.folder import RunFolder
from engine.run.identity import claim_run
from engine.run.lock import hold_lock
from engine.run.logs import log_line
from engine.run.process import drop_lifeline, hold_lifeline, report_errors, stop_all, watch_lifeline
from engine.run.run_inputs import record_inputs
from engine.run.trace import Trace

Say = Callable[[str], None]


def run_service(config: Config, say: Say) -> None:
    """Serve until SIGTERM or SIGINT. `config.model.path` must be a local folder. `say` is called with the address.

    Raises BadInput for a recipe that can't be served, and the error that ended the service. No process is left behind.
    """
    config = check_service(config)
    folder = RunFolder(config.folder)
    with hold_lock(folder.lock, f"run folder {folder.path}", 0.0):
        if folder.steps.exists():
            raise BadInput(f"run folder {folder.path} belongs to a training run; give another --set run.name=NAME")
        claim_run(config, resume=True)
        record_inputs(config)
        folder.create(config, resume=folder.config.exists())
        try:
            with contextlib.suppress(asyncio.CancelledError):  # a signal has ended it
                asyncio.run(_serve(config, folder, say))
        except Exception as error:
            ours = isinstance(error, MetronomeError)
            folder.write_failure(error if ours else MetronomeError(f"unexpected {type(error).__name__}: {error}"))
            raise
        finally:
            drop_lifeline()


def check_service(config: Config) -> Config:
    """Return the config without a layout of our own trainer. Raises BadInput for what a service does not support, and
    for what this machine lacks."""
    if config.train.record:
        raise BadInput("train.record = true: a service can't keep a record, because another program trains")
    if config.weights.transport in ("nccl", "hccl"):
        raise BadInput(
            f'weights.transport = "{config.weights.transport}": an outside trainer sends from host memory; set it to '
            '"file" or "gloo"'
        )
    if config.cluster.engine == "ray":
        raise BadInput('cluster.engine = "ray": Ray places instances of trainings and evaluations, not of a service')
    listen_address(config.rollout.listen)
    check_instances(config)
    config = config.model_copy(update={"parallel": Parallel()})
    check_rollouts(config)
    return config


async def _serve(config: Config, folder: RunFolder, say: Say) -> None:
    """Answer requests until a signal ends the service, or an error, which is raised."""
    task = asyncio.current_task()
    assert task is not None

    def stop() -> None:
        if not task.cancelling():
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    server = Server(config)
    async with server.listening(folder.path) as address:
        problems = await asyncio.to_thread(recorded_problems, config)
        scorers = start_scorers(config, folder, server)
        try:
            async with serving_plane(
                config=config,
                folder=folder,
                trace=Trace(folder.trace, "orchestrator"),
                problems=problems,
                server=server,
                weights=weights_folder(config, Path(hold_lifeline()).parent, folder.path),
                trains=False,
            ) as plane:
                server.serve(plane)
                say(f"the service answers at {address}")
                try:
                    await _watch(plane, server, scorers)
                finally:
                    await plane.close()
        finally:
            await asyncio.to_thread(stop_all, [scorer.child for scorer in scorers], END_S)


async def _watch(plane: Plane, server: Server, scorers: Sequence[ScorerProcess]) -> None:
    while plane.failure is None:
        if server.bug.done():
            server.bug.result()
        await plane.check_run()
        for scorer in scorers:
            await scorer.check_ranks(plane)
        await asyncio.sleep(0.1)
    raise plane.failure


def main() -> int:
    """Run the command line and return the exit code: 0, 1 on failure, 2 on bad input."""
    watch_lifeline()
    raise_limit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    arguments = parser.parse_args()
    return report_errors(lambda: run_service(load_config(arguments.config), log_line))


if __name__ == "__main__":
    sys.exit(main())
