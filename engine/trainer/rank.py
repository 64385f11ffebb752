"""One trainer rank, started by torch elastic: `python -m engine.trainer.rank --folder RUN --control ADDRESS`."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

from engine import platform
from engine.config import Config
from engine.config.recipe import load
from engine.errors import BadInput, MetronomeError
from engine.model.shape import content_hash
from engine.run.commands import STORE_IS_HERE
from engine.run.disk import named_disk_errors
from engine.run.fence import Fence
from engine.run.process import bind, watch_lifeline
from engine.run.trace import Trace
from engine.types import StepFigures
from engine.wire import messages
from engine.wire.control_client import ControlClient
from engine.wire.weights.watchdogs import WATCHDOGS

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torch's agent looks for a rank's error."""


class WholeErrorFile(ErrorHandler):
    """Leaves the traceback of an unexpected error for the agent, in a file that appears when it is complete.

    When a rank dies the agent ends the others, which may be writing their errors just then. torch's agent fails on half
    a file, and nobody would hear which rank died.
    """

    def record_exception(self, e: BaseException) -> None:
        """Write the error as torch does, beside the file; then rename it."""
        file = os.environ.get(ERROR_FILE)
        if file is None:
            super().record_exception(e)
            return
        partial = f"{file}.partial"
        os.environ[ERROR_FILE] = partial
        try:
            super().record_exception(e)
        finally:
            os.environ[ERROR_FILE] = file
        os.replace(partial, file)


def main() -> int:
    """Set the rank up, train, export. Return 0, or 1 after a MetronomeError, which the launcher is told.

    The message of any other error reaches the launcher through the agent.
    """
    return record(_main, WholeErrorFile())() or 0


def _main() -> int:
    watch_lifeline()
    arguments = _arguments()
    config = load(arguments.folder / "config.toml")
    bind(_own_cores(config))
    torch.set_num_threads(arguments.threads)
    name = f"trainer-{os.environ['RANK']}"
    control, sender = (
        ControlClient(arguments.control, who, config.transfer_timeout_s) for who in (name, f"{name}-weights")
    )
    try:
        with named_disk_errors(arguments.folder), _session(config):
            _train(config, arguments, control, sender)
        return 0
    except MetronomeError as error:
        control.ask(messages.TrainerFailed(error=messages.Failure.of(error)))
        return 1
    finally:
        control.close()
        sender.close()


def _own_cores(config: Config) -> list[int]:
    """Return this rank's share of `train.devices`, the cores that it may run on."""
    share = len(config.train.devices) // config.parallel.ranks_per_node
    first = int(os.environ["LOCAL_RANK"]) * share
    return config.train.devices[first : first + share]


def _session(config: Config) -> Any:  # noqa: ANN401
    for name, value in WATCHDOGS.get(config.weights.transport, {}).items():
        os.environ.setdefault(name, value)
    parallel = config.parallel
    machine = platform.get(config.platform.device)
    if config.train.deterministic:
        machine.make_deterministic()
    return platform.session(
        machine,
        config.run.seed,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        context=parallel.context,
        expert=parallel.expert,
        timeout_s=config.train.timeout_s,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="run folder with config.toml")
    parser.add_argument("--control", required=True, help="address of the launcher's control channel")
    parser.add_argument("--weights", type=Path, required=True, help="folder shared with the instances")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint")
    parser.add_argument("--attempt", type=int, required=True, help="number of the launcher's attempt")
    parser.add_argument("--replay", type=Path, help="train on a record instead of rollouts")
    return parser.parse_args()


def _train(config: Config, arguments: argparse.Namespace, control: ControlClient, sender: ControlClient) -> None:
    """Build the models, load the newest checkpoint if asked to, run the loop, export the final policy.

    `sender`: control channel of the thread that sends weights.
    """
    from engine.trainer.checkpoint.checkpoints import Checkpoints
    from engine.trainer.export import export
    from engine.trainer.loop import Loop
    from engine.trainer.policy import Policy
    from engine.trainer.rank_group import RankGroup

    base = Path(config.model.path)
    fence = Fence(arguments.folder, arguments.attempt)
    ranks = RankGroup(config.parallel.lockstep, config.transfer_timeout_s)
    policy = Policy(config, platform.get(config.platform.device), ranks)
    reference_hash = content_hash(base) if config.algorithm.kl_coef > 0 else None
    checkpoints = Checkpoints(
        root=arguments.folder / "checkpoints",
        policy=policy,
        config=config,
        reference_hash=reference_hash,
        fence=fence,
    )
    start = (checkpoints.resume() if arguments.resume else None) or 0
    if start > config.train.steps:
        raise BadInput(f"--resume: the run has trained {start} steps already, train.steps is {config.train.steps}")
    trace = Trace(arguments.folder / "trace", ranks.name)

    def save(step: int, figures: StepFigures | None) -> None:
        with trace.span("checkpoint", step=step):
            checkpoints.save(step, figures)

    def report(step: int, figures: StepFigures) -> None:
        checkpoints.poll()
        reply = ranks.from_first(lambda: control.ask(messages.Report(step=step, figures=figures)))
        checkpoints.prompt_position = reply.prompt_position

    rollouts = _rollouts(config=config, arguments=arguments, control=control, sender=sender, ranks=ranks, policy=policy)
    ready = messages.Ready(start=start, prompt_position=checkpoints.prompt_position, prompts=checkpoints.prompts)
    checkpoints.prompts = ranks.from_first(lambda: control.ask(ready)).fingerprint or checkpoints.prompts
    try:
        Loop(config=config, policy=policy, rollouts=rollouts, trace=trace, report=report, checkpoint=save).run(start)
    finally:
        trace.flush()
        checkpoints.finish(config.train.timeout_s)
    export(policy.models, ranks, base, target=arguments.folder / "policy", fence=fence.check)


def _rollouts(
    config: Config,
    arguments: argparse.Namespace,
    control: ControlClient,
    sender: ControlClient,
    ranks: Any,  # noqa: ANN401
    policy: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    from engine.trainer.models import DTYPES
    from engine.trainer.publish.publisher import Publisher
    from engine.trainer.publish.transports import open_transport
    from engine.trainer.rollouts import LiveRollouts, ReplayedRollouts
    from engine.trainer.stored_bodies import StoredBodies

    if arguments.replay is not None:
        return ReplayedRollouts(arguments.replay, control, ranks, config.train.prompts_per_step)
    publisher = Publisher(
        control=control,
        sender=sender,
        ranks=ranks,
        transport=partial(open_transport, config.weights.transport, config.rollout.timeout_s, policy.models.device),
        folder=arguments.weights,
        dtype=DTYPES[config.model.dtype],
        bucket_bytes=config.weights.bucket_mb * 2**20,
        timeout_s=config.transfer_timeout_s,
    )
    bodies = StoredBodies(ranks.name, config.queue.timeout_s) if STORE_IS_HERE in os.environ else None
    return LiveRollouts(control, ranks, publisher, budget=config.window_tokens, bodies=bodies)


if __name__ == "__main__":
    sys.exit(main())
