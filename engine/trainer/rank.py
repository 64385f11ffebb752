"""One trainer rank, started by torch elastic: `python -m engine.trainer.rank --folder RUN --plane URL`. When it runs
out of device memory, `MemoryWatch` reports which term of the dry run's estimate was exceeded."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from engine import platform
from engine.client.connection import Connection
from engine.config import Config
from engine.config.keys import flatten_keys
from engine.config.recipe import load_config
from engine.errors import DeviceMemoryError
from engine.model.shape import read_shape
from engine.platform import Platform
from engine.run.memory import LOWERED_BY, Term, trainer_need
from engine.run.process import bind_cores, watch_lifeline
from engine.run.progress import format_size
from engine.run.run_file import Fence
from engine.run.run_inputs import kept_code
from engine.run.trace import Trace
from engine.run.user_code import load_copies
from engine.trainer.ranks.rank_process import (
    connect_rank,
    leave_memory,
    open_session,
    own_share,
    run_rank,
    run_recorded,
)
from engine.types import StepFigures
from engine.wire import messages

if TYPE_CHECKING:
    from engine.trainer.policy import Policy
    from engine.trainer.rollouts import LiveRollouts, ReplayedRollouts

TOLERANCE = 1.05
"""The dry run's sum of the memory held between two steps is exact except for small tensors."""
RECOMPUTE = "train.recompute"
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class MemoryWatch:
    """Compares the memory that a rank holds with the dry run's sum (engine.run.memory) when the device runs out of
    memory."""

    def __init__(self, config: Config, platform: Platform, rank: str, folder: Path) -> None:
        """`rank`: name of the rank; `folder`: the run's log folder, where torch's memory table is written."""
        self._config = config
        self._platform = platform
        self._rank = rank
        self._file = folder / f"{rank}-memory.txt"
        self._when = "while it loaded its models"
        self._held: int | None = None

    def begin_step(self, step: int) -> None:
        """Record the memory held at the start of a step."""
        self._when = f"in step {step}"
        self._held = self._platform.held_bytes()

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Raise DeviceMemoryError if the body runs out of device memory, and write torch's memory table."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            said = str(error).strip().splitlines()[0] if str(error).strip() else "out of memory"
            wanted = self._platform.held_bytes() + _asked(said)
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(f"{error}\n\n{self._platform.memory_summary()}")
            compared = self._compared(max(wanted, self._platform.peak_bytes()))
            raise DeviceMemoryError(
                f"{self._rank} ran out of memory {self._when}: {compared}. torch says: {said} Its table of the memory: "
                f"{self._file}"
            ) from None

    def _compared(self, most: int) -> str:
        """Return which part of the dry run's sum was exceeded, and the keys that lower it. `most`: bytes needed,
        including the allocation that failed."""
        need = trainer_need(read_shape(Path(self._config.model.path)), self._config)
        states = need.part(states=True)
        working = need.part(states=False)
        held = self._held if self._held is not None else most
        expected = sum(term.bytes for term in states)
        if held > TOLERANCE * expected or self._held is None:
            when = "at the start of the step" if self._held is not None else "then"
            return f"{format_size(held)} were held {when}, where the dry run counts {self._listed(states)}"
        if most > expected + sum(term.bytes for term in working):
            return (
                f"{format_size(most)} were needed, {format_size(held)} of them at the start of the step, as the "
                f"dry run counts; for the work of a step it counts {self._listed(working)}"
            )
        return (
            f"{format_size(most)} were needed, no more than the dry run counts: the device has less, another "
            f"process uses it, or its memory is fragmented. It counts {self._listed((*states, *working))}"
        )

    def _listed(self, terms: Sequence[Term]) -> str:
        values = flatten_keys(self._config.model_dump())
        keys = dict.fromkeys(key for term in terms for key in LOWERED_BY[term.name])
        parts = " + ".join(f"{term.name} {format_size(term.bytes)}" for term in terms)
        total = format_size(sum(term.bytes for term in terms))
        settings = ", ".join(f"{key} (now {json.dumps(values[key])})" for key in keys)
        return f"{parts} = {total}. Keys that lower it: {settings}{self._softer() if RECOMPUTE in keys else ''}"

    def _softer(self) -> str:
        """Return advice on the next value of train.recompute, the one that costs the least time."""
        now = self._config.train.recompute
        if now is False:
            return f'; of {RECOMPUTE} try "selective" first, it costs little time'
        if now is True:
            return ""
        start = "a number above a third of a stage's layers" if now == "selective" else "a larger number of layers"
        return f"; of {RECOMPUTE} try {start}, and true last"


def _asked(said: str) -> int:
    """Return the number of bytes that torch failed to allocate, parsed from its message; 0 if the message does not
    say."""
    found = re.search(r"Tried to allocate ([\d.]+) ([KMG]iB)", said)
    return int(float(found[1]) * UNITS[found[2]]) if found else 0


class StepProfiler:
    """Runs a profiler from the start of the first chosen step to the end of the last."""

    def __init__(self, steps: Sequence[int], make: Callable[[], Any]) -> None:
        """`steps`: first and last step, or empty; `make` returns a profiler (`Platform.profiler`)."""
        self._steps = range(steps[0], steps[1] + 1) if steps else range(0)
        self._make = make
        self._running: Any = None

    def begin_step(self, step: int) -> None:
        """Start the profiler if the step is chosen. A resumed run may start after the first chosen step."""
        if self._running is None and step in self._steps:
            self._running = self._make()
            self._running.start()

    def end_step(self, step: int) -> None:
        """Stop the profiler after the last chosen step."""
        if self._running is not None and step == self._steps[-1]:
            self._running.stop()
            self._running = None


def main() -> int:
    """Set up the rank, train, export. Return 0, or 1 after a MetronomeError, which is reported to the orchestrator.

    The message of any other error reaches the orchestrator through the agent.
    """
    return run_recorded(_main)


def _main() -> int:
    watch_lifeline()
    arguments = _arguments()
    config = load_config(arguments.folder / "config.toml")
    load_copies(kept_code(arguments.folder, config, "algorithms"))
    bind_cores(own_share(config.train.devices, config.parallel.ranks_per_node))
    torch.set_num_threads(arguments.threads)
    plane = connect_rank(config, arguments.plane, f"trainer-{os.environ['RANK']}")
    return run_rank(
        folder=arguments.folder,
        plane=plane,
        stage=messages.TRAIN,
        session=partial(_session, config),
        work=partial(_train, config, arguments, plane),
    )


def _session(config: Config) -> AbstractContextManager[torch.device]:
    leave_memory(config, platform.get_platform(config.platform.device))
    return open_session(config, config.parallel)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="run folder with config.toml")
    parser.add_argument("--plane", required=True, help="URL of the orchestrator's server")
    parser.add_argument("--weights", type=Path, required=True, help="folder shared with the instances")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")
    parser.add_argument("--attempt", type=int, required=True, help="number of the orchestrator's attempt")
    parser.add_argument("--replay", type=Path, help="train on a record instead of rollouts")
    return parser.parse_args()


def _train(config: Config, arguments: argparse.Namespace, plane: Connection) -> None:
    """Train, and explain the cause if the device runs out of memory."""
    rank = f"trainer-{os.environ['RANK']}"
    watch = MemoryWatch(config, platform.get_platform(config.platform.device), rank, arguments.folder / "logs")
    with watch.named_errors():
        _train_watched(config, arguments, plane, watch)


def _train_watched(config: Config, arguments: argparse.Namespace, plane: Connection, watch: MemoryWatch) -> None:
    """Build the models, load the newest checkpoint if asked to, run the loop, export the final policy."""
    from engine.trainer.checkpoint.checkpoints import Checkpoints
    from engine.trainer.export import export_policy
    from engine.trainer.loop import Figures, Loop
    from engine.trainer.policy import Policy
    from engine.trainer.ranks.rank_group import RankGroup

    base = Path(config.model.path)
    fence = Fence(arguments.folder, arguments.attempt)
    ranks = RankGroup(config.parallel.lockstep, config.transfer_timeout_s)
    trace = Trace(arguments.folder / "trace", ranks.name)
    machine = platform.get_platform(config.platform.device)
    policy = Policy(config, machine, ranks, trace)
    profiler = StepProfiler(
        config.train.profile, partial(machine.profiler, arguments.folder / "profile", f"rank-{os.environ['RANK']}")
    )
    checkpoints = Checkpoints(
        root=arguments.folder / "checkpoints",
        policy=policy,
        config=config,
        fence=fence,
    )
    start = (checkpoints.resume() if arguments.resume else None) or 0
    rollouts = _rollouts(config=config, arguments=arguments, plane=plane, ranks=ranks, policy=policy)
    rollouts.prompt_position = checkpoints.prompt_position
    rollouts.prompts = checkpoints.prompts
    rollouts.notices = checkpoints.notices
    policy.heartbeat = rollouts.heartbeat

    def begin(step: int) -> None:
        watch.begin_step(step)
        profiler.begin_step(step)

    def save(step: int, figures: Figures | None) -> None:
        checkpoints.prompts = rollouts.prompts
        with trace.span("checkpoint", step=step):
            checkpoints.save(step, figures)

    def report(step: int, figures: Figures) -> None:
        checkpoints.poll()
        told = cast(StepFigures, {key: figures[key] for key in StepFigures.__annotations__ if key in figures})
        ranks.from_first(lambda: plane.ask(messages.Report(step=step, figures=told, advantages=policy.advantages)))
        checkpoints.prompt_position = rollouts.prompt_position
        profiler.end_step(step)

    loop = Loop(
        config=config, trainer=policy, rollouts=rollouts, report=report, trace=trace, checkpoint=save, begin=begin
    )
    try:
        loop.run(start)
    finally:
        trace.flush()
        checkpoints.finish(config.train.timeout_s)
    export_policy(policy.models, ranks, base, target=arguments.folder / "policy", fence=fence.check_attempt)


def _rollouts(
    config: Config,
    arguments: argparse.Namespace,
    plane: Connection,
    ranks: Any,  # noqa: ANN401
    policy: Policy,
) -> LiveRollouts | ReplayedRollouts:
    from engine.client.publish.publisher import Publisher
    from engine.trainer.rollouts import LiveRollouts, ReplayedRollouts

    if arguments.replay is not None:
        return ReplayedRollouts(arguments.replay, plane, ranks, config)
    publisher = Publisher.of(
        config=config, connection=plane, ranks=ranks, folder=arguments.weights, device=policy.models.device
    )
    # on a CPU the thread would slow down training itself
    prefetch = {"on": True, "off": False, "auto": policy.models.device.type != "cpu"}[config.train.prefetch]
    return LiveRollouts(
        control=plane,
        ranks=ranks,
        publisher=publisher,
        config=config,
        prefetch=prefetch,
    )


if __name__ == "__main__":
    sys.exit(main())
