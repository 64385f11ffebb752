"""The orchestrator: starts, watches and ends the processes of a run.

`python -m engine.orchestrator.launch --config FILE [--resume] [--replay FILE] [--events DESCRIPTOR] [--attempt N]`

The orchestrator runs the producer, the table of rows and its server, and starts the verifier workers and the rollout
instances. The ranks of trainer and scorers run under torch elastic. All of these processes end with the orchestrator,
however it ends (engine.run.process).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.config.recipe import load_config
from engine.data.problem_statistics import recorded_problems
from engine.errors import (
    BadInput,
    MetronomeError,
    ProcessDied,
    RatioGapError,
    Stopped,
    WeightSyncError,
    clean_line,
    counted,
)
from engine.orchestrator.checks import check_instances, check_training
from engine.orchestrator.opening import serving_plane, weights_folder
from engine.orchestrator.plane import Plane
from engine.orchestrator.run_events import RunEvents
from engine.orchestrator.scorer_process import END_S, ScorerProcess, start_scorers
from engine.orchestrator.server import Server, listen_address
from engine.run.commands import (
    agent_command,
    rank_arguments,
    trainer_environment,
)
from engine.run.disk import named_disk_errors, raise_limit
from engine.run.divergence import find_divergence
from engine.run.event_stream import EventWriter
from engine.run.files import read_lines
from engine.run.folder import RunFolder
from engine.run.identity import claim_run
from engine.run.limits import saving_s
from engine.run.lock import ENDING_S, hold_lock
from engine.run.logs import log_error, log_line, log_traceback
from engine.run.process import BAD_INPUT, Child, drop_lifeline, hold_lifeline, stop_all, watch_lifeline
from engine.run.progress import Progress
from engine.run.run_inputs import record_inputs
from engine.run.trace import Trace
from engine.types import JsonObject
from engine.wire import record
from engine.wire.access_token import VARIABLE as TOKEN
from engine.wire.access_token import is_loopback
from engine.wire.certificate import Certificate
from engine.wire.invitation import INVITATION, write_invitation

STOP_S = 60.0
"""Seconds that a trainer which was told to stop may take for its checkpoint, or `limits.saving_s` if that is longer. If
`train.timeout_s`, the trainer's longest wait, is shorter, it applies instead, unless a signal ended the run."""

BEAT_S = 0.5
"""Seconds between two signs of life."""


def launch_run(
    config: Config,
    resume: bool = False,
    replay: Path | None = None,
    events: EventWriter | None = None,
    attempt: int = 0,
) -> RunFolder:
    """Train, and return the run folder. `config.model.path` must be a local folder. `events`: gets steps, notices and
    progress. `attempt`: its number, if a flow has entered the run folder and holds its lock; 0: this process does.

    Raises the error that ended the run. No process is left behind.
    """
    check_training(config)
    listen_address(config.rollout.listen)
    if replay is None:
        check_instances(config)
    else:
        record.check_record(replay, config)
    folder = RunFolder(config.folder, events)
    with _entered(config, folder, resume, attempt), open(os.devnull) as reserve:
        try:
            with named_disk_errors(folder.path):
                if not attempt:
                    record_inputs(config)
                folder.create(config, resume)
                asyncio.run(_Orchestrator(config, folder, resume, replay).run())
        except Exception as error:
            reserve.close()  # failure.json is written although no further file could be opened
            if isinstance(error, WeightSyncError | RatioGapError):
                error.args = (_explained(folder, str(error)),)
            if isinstance(error, MetronomeError):
                folder.write_failure(error)
                raise
            log_traceback(error)
            told = MetronomeError(f"unexpected {type(error).__name__}: {error}")
            folder.write_failure(told)
            raise told from error
        finally:
            if not folder.fence.is_passed:
                (folder.path / INVITATION).unlink(missing_ok=True)
            drop_lifeline()
    return folder


@contextlib.contextmanager
def _entered(config: Config, folder: RunFolder, resume: bool, attempt: int) -> Iterator[None]:
    """During the body, this process writes the run, as the orchestrator of an attempt or as an attempt of its own."""
    if attempt:
        folder.fence.attempt = attempt
        yield
        return
    with hold_lock(folder.lock, f"run folder {folder.path}", ENDING_S):
        claim_run(config, resume)
        folder.fence.begin_attempt("training", "the orchestrator was started by itself")
        yield


def _explained(folder: RunFolder, error: str) -> str:
    """The error of numerics that differ. First that training has diverged, if the steps show it: numerics differ then,
    too. Otherwise at its end the figures of the last step."""
    rows = list(read_lines(folder.steps))
    if told := find_divergence(rows).describe():
        return f"{told}. Then {error}"
    if not rows:
        return error
    return (
        f"{error}; or training diverges: the update of step {rows[-1]['step']} had loss {rows[-1]['loss']:.3g}, "
        f"grad_norm {rows[-1]['grad_norm']:.3g} and learning rate {rows[-1]['learning_rate']:.3g}"
    )


class _Orchestrator:
    def __init__(self, config: Config, folder: RunFolder, resume: bool, replay: Path | None) -> None:
        self.config = config
        self.folder = folder
        self.resume = resume
        self.replay = replay
        self.scratch = Path(hold_lifeline()).parent
        self.trace = Trace(folder.trace, "orchestrator")
        self._certificate = Certificate.make() if config.parallel.nodes > 1 else None
        self._beating: asyncio.Task[None]
        self._signal: str | None = None
        """Name of the first signal that told the run to end; None if there was none."""
        self._plane: Plane | None = None
        self._notices = RunEvents(self._tell)
        self._scorers: list[ScorerProcess] = []
        """The scorers of the stages whose ranks are ours; empty in a replay, whose record holds their columns."""

    async def run(self) -> None:
        """Start all processes, wait until the trainer ends, then end the others.

        All processes start at the same time, because each takes seconds.
        """
        self._stop_on_signals()
        server = Server(self.config)
        self._beating = asyncio.create_task(self._beat(server))
        try:
            await self._run(server)
        finally:
            self._beating.cancel()
            self._notices.close()
            self._send_progress(Progress("the orchestrator ends its processes"))

    async def _beat(self, server: Server) -> None:
        """Send the flow the notices that are due, and progress, which also shows that this process is alive
        (tasks.stages.orchestrator_process). Raises TakenOver if another orchestrator now writes the run."""
        while True:
            self.folder.fence.check_attempt()
            self._notices.report_due()
            self._send_progress(live_progress(server, self.config.train.steps))
            await asyncio.sleep(BEAT_S)

    def _send_progress(self, progress: Progress) -> None:
        self.folder.events.send("progress", [progress.text, progress.share])

    def _tell(self, stage: str, text: str) -> None:
        log_line(f"{stage}: {clean_line(text)}")
        self.folder.add_notice(stage, text)

    async def _run(self, server: Server) -> None:
        async with server.listening(self.folder.path, self._certificate):
            if self.replay is not None:
                plane = Plane(self.config, self.folder, self.trace)
                await self._serve_trainer(plane, server, self._start_trainer(server))
                return
            problems = await asyncio.to_thread(recorded_problems, self.config)
            trainer = self._start_trainer(server)
            try:
                self._scorers = start_scorers(self.config, self.folder, server)
                async with serving_plane(
                    config=self.config,
                    folder=self.folder,
                    trace=self.trace,
                    problems=problems,
                    server=server,
                    weights=self._weights_folder(),
                    notices=self._notices,
                ) as plane:
                    await self._serve_trainer(plane, server, trainer)
            finally:
                await asyncio.to_thread(self._stop_ranks, trainer)

    def _start_trainer(self, server: Server) -> Child:
        # A run that was killed may have left an incomplete version there, in another layout.
        shutil.rmtree(self._weights_folder(), ignore_errors=True)
        log = self.folder.logs / "trainer.log"
        env = trainer_environment(self.config, self._instances_elsewhere) | server.environment
        return Child("trainer", self._trainer_command(server), log, env)

    async def _serve_trainer(self, plane: Plane, server: Server, trainer: Child) -> None:
        """Answer the trainer's requests and watch all processes until the trainer ends."""
        self._plane = plane
        server.serve(plane)
        try:
            await self._wait_for_trainer(trainer, server, plane)
        finally:
            await asyncio.to_thread(self._stop_ranks, trainer)
            await plane.close()

    def _stop_ranks(self, trainer: Child) -> None:
        stop_all([trainer, *(scorer.child for scorer in self._scorers)], END_S)

    @property
    def _instances_elsewhere(self) -> bool:
        """Whether instances on other machines may join."""
        return not is_loopback(listen_address(self.config.rollout.listen)[0])

    def _trainer_command(self, server: Server) -> list[str]:
        arguments = rank_arguments(
            config=self.config,
            folder=self.folder.path,
            plane=server.url,
            weights=self._weights_folder(),
            attempt=self.folder.fence.attempt,
            resume=self.resume,
            replay=self.replay,
        )
        if self._certificate is None:
            return agent_command(self.config, arguments, None)
        run_id = uuid.uuid4().hex
        write_invitation(
            config=self.config,
            folder=self.folder.path,
            run_id=run_id,
            arguments=arguments,
            token=server.environment[TOKEN],
            certificate=self._certificate.public,
        )
        return agent_command(self.config, arguments, run_id)

    def _weights_folder(self) -> Path:
        return weights_folder(self.config, self.scratch, self.folder.path)

    async def _wait_for_trainer(self, trainer: Child, server: Server, plane: Plane) -> None:
        """Wait until the trainer ends, calling Plane.check_run regularly.

        Raises the error that ended the run: the trainer's error; the plane's if the trainer does not stop in time or
        dies; ProcessDied if it dies without an error; TakenOver if another orchestrator has begun; or an unexpected
        exception raised while answering.
        """
        stop_by: float | None = None
        while trainer.alive:
            for background in (server.bug, self._beating):
                if background.done():
                    background.result()
            await plane.check_run()
            for scorer in self._scorers:
                await scorer.check_ranks(plane)
            if self._signal is not None and plane.failure is None:
                await plane.stop_run(Stopped(f"ended by {self._signal}"))
            if plane.failure is not None:
                stop_by = stop_by or time.monotonic() + self._grace_s()
                if time.monotonic() > stop_by:
                    raise plane.failure
            await asyncio.sleep(0.1)
        if plane.trainer_error is not None:
            raise plane.trainer_error
        if trainer.process.returncode:
            raise plane.failure or ProcessDied(f"the trainer died: {trainer.how_it_ended()}")

    def _grace_s(self) -> float:
        """Return the seconds that the trainer may take to stop. After a signal a person waits, who can send another."""
        saving = saving_s(self.config)
        return saving if self._signal is not None else min(max(STOP_S, saving), self.config.train.timeout_s)

    def _stop_on_signals(self) -> None:
        """Let SIGINT and SIGTERM end the run, after the trainer has saved the weights from before its current step.

        A second signal ends the run at once, and so does the first one if the trainer is not ready yet. The `finally`
        blocks clean up.
        """
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError, RuntimeError):  # outside the main thread, the caller handles signals
                loop.add_signal_handler(number, self._handle_signal, task, signal.Signals(number).name)

    def _handle_signal(self, task: asyncio.Task[None], name: str) -> None:
        if self._signal is None and self._plane is not None and self._plane.is_ready:
            self._signal = name
        else:
            task.cancel(f"ended by {name}")


def live_progress(server: Server, steps: int) -> Progress:
    """The progress of a training of `steps` steps now. `server`: has the pool and the plane as soon as they are
    there."""
    found: JsonObject = {"ready": False}
    if (pool := server.pool) is not None:
        loads = [one.load for one in pool.instances if one.load is not None]
        found |= {
            "instances": len(pool.processes.declared),
            "met": sum(one.met for one in pool.instances),
            "running": sum(load.running for load in loads),
            "tokens_per_s": round(sum(one.tokens_per_s for one in pool.instances)),
        }
    if server.plane is not None:
        found |= server.plane.stage_progress()
    return training_progress(found, steps)


def training_progress(found: Mapping[str, Any], steps: int) -> Progress:
    """The progress of a training of `steps` steps. `found`: counts of the pool, if it has started, and those of
    `Plane.stage_progress`."""
    if not found["ready"]:
        waits = "starting"
        if "met" in found:
            met = found["met"]
            of = found["instances"]
            waits = f"{met:,} of {counted(of, 'instance')} ready" if of else f"joined: {counted(met, 'instance')}"
        return Progress(f"loading the models; {waits}", None)
    if "step" not in found and found.get("done") == steps:
        return Progress("the last checkpoint and the policy are written", 1.0)
    if "step" not in found:
        none = found.get("met") == 0
        return Progress("waiting for an instance" if none else "weights are on their way to the instances", None)
    step = found["step"]
    expected = found["expected"]
    done = f"{step:,}/{counted(steps, 'step')}"
    groups = counted(expected, "group")
    text = f"{done}; in the next: {found['trained']:,} of {groups} trained"
    if not found["arrived"]:
        text = (
            f"{done}; in the next: waiting for the first of {groups}; "
            f"{found.get('running', 0):,} in flight, {found.get('tokens_per_s', 0):,} tokens/s"
        )
    elif found["trained"] < found["arrived"] or found["arrived"] < expected:
        text += f", {found['arrived']:,} sampled"
    if (under_way := found.get("evaluation")) is not None:
        text += (
            f"; evaluating version {under_way['version']}: {under_way['finished']:,} of {under_way['expected']:,} "
            "responses"
        )
    return Progress(text, (step + found["trained"] / expected) / steps)


def main() -> int:
    """Run the command line and return the exit code: 0, 1 on failure, 2 on bad input.

    The reason is printed, and sent to the process that started this one; `launch_run` also leaves an error of a started
    run in failure.json.
    """
    watch_lifeline()
    raise_limit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--events", type=int)
    parser.add_argument("--attempt", type=int, default=0)
    arguments = parser.parse_args()
    events = EventWriter(arguments.events)
    try:
        launch_run(
            config=load_config(arguments.config),
            resume=arguments.resume,
            replay=arguments.replay,
            events=events,
            attempt=arguments.attempt,
        )
    except MetronomeError as error:
        events.send("failed", [type(error).__name__, str(error)])
        refused = isinstance(error, BadInput)
        log_error(f"error: {error}" if refused else f"error: {type(error).__name__}: {error}")
        return BAD_INPUT if refused else 1
    except asyncio.CancelledError as ended:
        log_error(f"error: {' '.join(map(str, ended.args)) or 'cancelled'}")
        return 1
    finally:
        events.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
