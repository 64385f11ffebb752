"""Starts, watches and ends the processes of a run: `python -m engine.launch --config FILE [--resume] [--replay FILE]`.

The launcher holds the producer, the verifiers' workers, the pool of instances and the sample queue; the trainer ranks
run under torch elastic. Whatever ends the launcher ends them all (engine.process).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import signal
import sys
import time
from pathlib import Path

from engine.conductor import Conductor
from engine.config import Config
from engine.data.loader import PromptLoader
from engine.data.problems import read_problems
from engine.data.prompts import encode
from engine.errors import BadInput, MetronomeError, ProcessDied
from engine.process import Child, drop_lifeline, hold_lifeline, python, watch_lifeline
from engine.queue.server import ControlServer
from engine.recipe import load
from engine.rollout.client import Sampling
from engine.rollout.pool import Pool
from engine.rollout.service import rollout_service
from engine.rollout.tokens import Tokens
from engine.run_folder import RunFolder
from engine.trace import Trace
from engine.trainer.record import Replay
from engine.types import Prompt

STOP_S = 60.0
"""How long a trainer that was told to stop may take for its checkpoint."""


def launch(config: Config, resume: bool = False, replay: Path | None = None) -> RunFolder:
    """Train. `config.model.path` is a folder by now. Raises the error that ended the run; no process is left behind."""
    folder = RunFolder(config.folder)
    folder.create(config, resume)
    try:
        asyncio.run(_Launcher(config, folder, resume, replay).run())
    except MetronomeError as error:
        folder.fail(error)
        raise
    finally:
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

    async def run(self) -> None:
        """Bring everything up, wait for the trainer's end, bring everything down."""
        self._stop_on_signals()
        if self.replay is not None:
            Replay(self.replay, self.config.train.prompts_per_step)  # a file that is no record is refused before anything starts
            await self._train(Conductor(self.config, self.folder, None, None, None, self.trace), None)
            return
        model = Path(self.config.model.path)
        tokens = Tokens(model)
        loader = PromptLoader(self._prompts(tokens), self.config.run.seed, self.config.train.prompts_per_step)
        rollout = self.config.rollout
        stop = tokens.stop_ids(rollout.stop)
        sampling = Sampling(rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k, stop)
        async with rollout_service(
            self.config, model, self.folder.path, tokens, sampling, rollout.group_size, self.trace
        ) as (pool, producer):
            await self._train(Conductor(self.config, self.folder, loader, pool, producer, self.trace), pool)

    def _prompts(self, tokens: Tokens) -> tuple[Prompt, ...]:
        problems = read_problems(self.config.data.train)
        return encode(problems, tokens.tokenizer, self.config.data.prompt_template, self.config.rollout.max_context).prompts

    async def _train(self, conductor: Conductor, pool: Pool | None) -> None:
        """Start the trainer beside the instances and watch both until the trainer ends."""
        address = f"ipc://{self.scratch}/control"
        server = asyncio.create_task(ControlServer(address, conductor.handlers()).serve())
        trainer = Child("trainer", self._trainer_command(address), self.folder.logs / "trainer.log",
                        {"OMP_NUM_THREADS": str(self.config.threads)})
        try:
            if pool is not None:
                await pool.connect()
            await self._watch(trainer, server, conductor, pool)
        finally:
            await conductor.close()
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)
            await asyncio.to_thread(trainer.stop, 1.0)

    def _trainer_command(self, address: str) -> list[str]:
        arguments = ["--folder", str(self.folder.path), "--control", address, "--weights", str(self._weights_folder()),
                     "--threads", str(self.config.threads)]
        arguments += ["--resume"] if self.resume else []
        arguments += ["--replay", str(self.replay)] if self.replay is not None else []
        return python("engine.trainer.elastic", "--ranks", "1", "--", *arguments)

    def _weights_folder(self) -> Path:
        """Beside the lifeline (shared memory where there is some) if two versions fit well, else in the run folder."""
        needed = sum(path.stat().st_size for path in Path(self.config.model.path).glob("*.safetensors"))
        roomy = shutil.disk_usage(self.scratch).free > 4 * needed
        return (self.scratch if roomy else self.folder.path) / "weights"

    async def _watch(self, trainer: Child, server: asyncio.Task[None], conductor: Conductor, pool: Pool | None) -> None:
        """Until the trainer ends. An instance's death with none left stops the run; so does the control channel's."""
        stop_by: float | None = None
        while trainer.alive:
            if server.done():
                server.result()
            if pool is not None and pool.size == 0:
                await conductor.fail(pool.all_gone())
            if conductor.failure is not None:
                stop_by = stop_by or time.monotonic() + STOP_S
                if time.monotonic() > stop_by:
                    raise conductor.failure
            await asyncio.sleep(0.1)
        if conductor.told is not None:
            raise conductor.told
        if trainer.process.returncode:
            raise conductor.failure or ProcessDied(f"the trainer died: {trainer.how_it_ended()}")

    def _stop_on_signals(self) -> None:
        """SIGINT and SIGTERM cancel the run; clean-up happens in the `finally` blocks."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread: the caller handles signals
                loop.add_signal_handler(number, task.cancel, f"ended by {signal.Signals(number).name}")


def main() -> int:
    """Command line: exit 0, 1 on failure, 2 on bad input; the reason is printed and left in failure.json."""
    watch_lifeline()
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
        return 1
    except asyncio.CancelledError as ended:
        print(f"error: {' '.join(map(str, ended.args)) or 'cancelled'}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
