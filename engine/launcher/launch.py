"""The launcher: starts, watches and ends the processes of a run.

`python -m engine.launcher.launch --config FILE [--resume] [--replay FILE]`

The launcher runs the producer and the sample queue, and starts the verifier workers and the rollout instances. The
trainer ranks run under torch elastic. When the launcher ends, however it ends, all of them end (engine.run.process).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import signal
import sys
import time
import uuid
from pathlib import Path

from engine.config import Config
from engine.config.recipe import load
from engine.data.loader import PromptLoader
from engine.data.prepared import training_problems
from engine.data.problems import Problems
from engine.data.prompts import encode
from engine.errors import BadInput, MetronomeError, ProcessDied, Stopped, TakenOver
from engine.launcher.checks import check_instances, check_training
from engine.launcher.coordinator import Coordinator
from engine.launcher.group_store import starting_store
from engine.launcher.http_server import listen_address
from engine.launcher.live_progress import LiveProgress
from engine.launcher.pool.joining import serve_joining
from engine.launcher.rollout_service import rollout_service
from engine.launcher.weight_sync.place import weights_folder
from engine.run.commands import agent_command, rank_arguments, trainer_environment
from engine.run.disk import named_disk_errors
from engine.run.fence import TAKEN_OVER, Fence
from engine.run.folder import RunFolder
from engine.run.identity import claim
from engine.run.lock import hold_lock
from engine.run.logs import kept_small
from engine.run.open_files import raise_limit
from engine.run.process import Child, drop_lifeline, hold_lifeline, watch_lifeline
from engine.run.trace import Trace
from engine.wire import record
from engine.wire.access_token import is_loopback
from engine.wire.control_keys import CONTROL_KEY, make_keys
from engine.wire.control_server import ControlServer
from engine.wire.invitation import INVITATION, control_address, invite

STOP_S = 60.0
"""Seconds that a trainer which was told to stop may take for its checkpoint. If `train.timeout_s`, the longest of the
trainer's waits, is shorter, that counts."""

STOP_BY_SIGNAL_S = 5.0
"""The same, in seconds, when a signal ended the run: the user who cancels a run waits for its end."""

TAKEOVER_S = 30.0
"""Seconds to wait for the lock of the run folder. The launcher of a killed attempt may still hold it; its lifeline ends
that launcher within a second or two."""

BEAT_S = 0.5
"""Seconds between two signs of life."""

END_S = 5.0
"""Seconds that the agent may take to end its ranks, by force if need be (engine.trainer.agent), before it is killed."""


def launch(config: Config, resume: bool = False, replay: Path | None = None) -> RunFolder:
    """Train, and return the run folder. `config.model.path` must be a local folder.

    Raises the error that ended the run. No process is left behind.
    """
    check_training(config)
    listen_address(config.rollout.listen)
    if replay is None:
        check_instances(config)
    else:
        record.check(replay, config)
    folder = RunFolder(config.folder)
    with hold_lock(folder.launcher_lock, f"run folder {folder.path}", TAKEOVER_S):
        claim(folder.path, config, resume)
        folder.fence = Fence.begin(folder.path)
        try:
            with named_disk_errors(folder.path):
                folder.create(config, resume)
                asyncio.run(_Launcher(config, folder, resume, replay).run())
        except MetronomeError as error:
            folder.fail(error)
            raise
        finally:
            if not folder.fence.is_passed:
                (folder.path / INVITATION).unlink(missing_ok=True)
            drop_lifeline()
    return folder


class _Launcher:
    def __init__(self, config: Config, folder: RunFolder, resume: bool, replay: Path | None) -> None:
        self.config = config
        self.folder = folder
        self.resume = resume
        self.replay = replay
        self.scratch = Path(hold_lifeline()).parent
        self.trace = Trace(folder.trace, "launcher")
        self._keys = make_keys() if config.parallel.nodes > 1 else None
        self._beating: asyncio.Task[None]
        self._signal: str | None = None
        """Name of the first signal that told the run to end; None before."""
        self._coordinator: Coordinator | None = None
        self._live = LiveProgress(folder)

    async def run(self) -> None:
        """Start all processes, wait until the trainer ends, then end the others.

        All processes start at the same time, because each takes seconds.
        """
        self._stop_on_signals()
        self._beating = asyncio.create_task(self._beat())
        try:
            async with kept_small(self.folder.logs):
                await self._run()
        finally:
            self._beating.cancel()
            self._live.close()

    async def _beat(self) -> None:
        """Show the flow that this process lives (tasks.launcher_process). Raises TakenOver if another launcher writes
        the run now."""
        while True:
            self.folder.fence.check()
            self.folder.heartbeat.touch()
            self._live.look()
            await asyncio.sleep(BEAT_S)

    async def _run(self) -> None:
        if self.replay is not None:
            await self._serve_trainer(Coordinator(self.config, self.folder, self.trace), self._start_trainer())
            return
        problems = await asyncio.to_thread(training_problems, self.config)
        trainer = self._start_trainer()
        try:
            await self._run_with_rollouts(problems, trainer)
        finally:
            await asyncio.to_thread(trainer.stop, END_S)

    async def _run_with_rollouts(self, problems: Problems, trainer: Child) -> None:
        config = self.config
        model = Path(self.config.model.path)
        group_size = config.rollout.group_size
        async with (
            rollout_service(
                config=config,
                model=model,
                folder=self.folder.path,
                settings=config.rollout,
                group_size=group_size,
                trace=self.trace,
                synced=True,
                notices=self._live.notices,
            ) as service,
            serve_joining(service.pool, config, self.folder.path) as routes,
            starting_store(config, self.folder.path) as store,
        ):
            self._live.pool = service.pool
            tokenizer = service.tokenizer
            template = config.data.prompt_template
            longest = config.rollout.max_context
            encoded = await asyncio.to_thread(
                lambda: encode(problems, tokenizer.hf, template, longest, vocabulary=tokenizer.vocabulary())
            )
            loader = PromptLoader(encoded.prompts, config.run.seed, config.train.prompts_per_step)
            await service.pool.connect()
            coordinator = Coordinator(
                config=config,
                folder=self.folder,
                trace=self.trace,
                loader=loader,
                service=service,
                store=await store if store is not None else None,
            )
            routes.step = lambda: coordinator.last
            await self._serve_trainer(coordinator, trainer)

    def _start_trainer(self) -> Child:
        # A run that was killed may have left half a version there, in another layout.
        shutil.rmtree(self._weights_folder(), ignore_errors=True)
        log = self.folder.logs / "trainer.log"
        env = trainer_environment(self.config, self._instances_elsewhere)
        env |= {CONTROL_KEY: self._keys.public} if self._keys is not None else {}
        return Child("trainer", self._trainer_command(), log, env)

    async def _serve_trainer(self, coordinator: Coordinator, trainer: Child) -> None:
        """Serve the trainer's requests and watch all processes until the trainer ends."""
        self._coordinator = coordinator
        self._live.coordinator = coordinator
        server = asyncio.create_task(ControlServer(self._address, coordinator.answer, self._keys).serve())
        try:
            await self._wait_for_trainer(trainer, server, coordinator)
        finally:
            await asyncio.to_thread(trainer.stop, END_S)
            await coordinator.close()
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)

    @property
    def _address(self) -> str:
        return control_address(self.config) if self.config.parallel.nodes > 1 else f"ipc://{self.scratch}/control"

    @property
    def _instances_elsewhere(self) -> bool:
        """Whether instances on other machines may join."""
        return not is_loopback(listen_address(self.config.rollout.listen)[0])

    def _trainer_command(self) -> list[str]:
        weights = self._weights_folder()
        arguments = rank_arguments(
            config=self.config,
            folder=self.folder.path,
            control=self._address,
            weights=weights,
            attempt=self.folder.fence.attempt,
            resume=self.resume,
            replay=self.replay,
        )
        if self._keys is None:
            return agent_command(self.config, arguments, None)
        run_id = uuid.uuid4().hex
        invite(config=self.config, folder=self.folder.path, run_id=run_id, arguments=arguments, key=self._keys.public)
        return agent_command(self.config, arguments, run_id)

    def _weights_folder(self) -> Path:
        return weights_folder(self.config, self.scratch, self.folder.path)

    async def _wait_for_trainer(self, trainer: Child, server: asyncio.Task[None], coordinator: Coordinator) -> None:
        """Wait until the trainer ends, and call Coordinator.check meanwhile.

        Raises the error that ended the run: the trainer's own, the coordinator's if the trainer does not stop in time
        or dies, ProcessDied if it dies without one, TakenOver if another launcher has begun, or the exception that
        ended the control channel's server.
        """
        stop_by: float | None = None
        while trainer.alive:
            for background in (server, self._beating):
                if background.done():
                    background.result()
            await coordinator.check()
            if self._signal is not None and coordinator.failure is None:
                await coordinator.fail(Stopped(f"ended by {self._signal}"))
            if coordinator.failure is not None:
                grace_s = min(STOP_S, self.config.train.timeout_s) if self._signal is None else STOP_BY_SIGNAL_S
                stop_by = stop_by or time.monotonic() + grace_s
                if time.monotonic() > stop_by:
                    raise coordinator.failure
            await asyncio.sleep(0.1)
        if coordinator.trainer_error is not None:
            raise coordinator.trainer_error
        if trainer.process.returncode:
            raise coordinator.failure or ProcessDied(f"the trainer died: {trainer.how_it_ended()}")

    def _stop_on_signals(self) -> None:
        """Let SIGINT and SIGTERM end the run, after the trainer has saved the weights from before its current step.

        A second signal ends the run at once, as does the first one before the trainer is ready. The `finally` blocks
        clean up.
        """
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError, RuntimeError):  # outside the main thread the caller handles signals
                loop.add_signal_handler(number, self._handle_signal, task, signal.Signals(number).name)

    def _handle_signal(self, task: asyncio.Task[None], name: str) -> None:
        if self._signal is None and self._coordinator is not None and self._coordinator.is_ready:
            self._signal = name
        else:
            task.cancel(f"ended by {name}")


def main() -> int:
    """Run the command line and return the exit code: 0, 1 on failure, 2 on bad input, 3 if another launcher has begun.

    The reason is printed; `launch` also leaves an error of a started run in failure.json.
    """
    watch_lifeline()
    raise_limit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--replay", type=Path)
    arguments = parser.parse_args()
    try:
        launch(load(arguments.config), arguments.resume, arguments.replay)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except MetronomeError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return TAKEN_OVER if isinstance(error, TakenOver) else 1
    except asyncio.CancelledError as ended:
        print(f"error: {' '.join(map(str, ended.args)) or 'cancelled'}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
