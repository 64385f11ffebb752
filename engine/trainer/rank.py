"""One trainer rank, started by torch elastic: `python -m engine.trainer.rank --folder RUN --control ADDRESS`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.elastic.multiprocessing.errors import record

from engine.config import Config
from engine.errors import BadInput, MetronomeError
from engine.model.shape import content_hash, read_shape
from engine.platform import cpu
from engine.process import bind, watch_lifeline
from engine.queue.client import ControlClient
from engine.recipe import load
from engine.trace import Trace
from engine.trainer.source import Live, Recorded, Recording, Rollouts
from engine.weights.transport import FileTransport, Publisher


@record  # leaves the traceback of an unexpected error for the agent, whose message reaches the launcher
def main() -> int:
    """Set the rank up, train, export; an error of ours is told to the launcher before exiting with 1."""
    watch_lifeline()
    arguments = _arguments()
    config = load(arguments.folder / "config.toml")
    bind(config.train.devices)
    torch.set_num_threads(arguments.threads)
    replica = f"trainer-{os.environ['RANK']}"
    # longer than an instance may take for an update, so that the launcher, who knows its name, gives up first
    control = ControlClient(arguments.control, replica, config.train.timeout_s + config.rollout.timeout_s)
    try:
        with cpu.megatron(config.run.seed):
            _train(config, arguments, control)
        return 0
    except MetronomeError as error:
        control.ask("failed", error=type(error).__name__, message=str(error))
        return 1
    finally:
        control.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="run folder with config.toml")
    parser.add_argument("--control", required=True, help="address of the launcher's control channel")
    parser.add_argument("--weights", type=Path, required=True, help="folder shared with the instances")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint")
    parser.add_argument("--replay", type=Path, help="train on a record instead of rollouts")
    return parser.parse_args()


def _train(config: Config, arguments: argparse.Namespace, control: ControlClient) -> None:
    """Build the models, load the newest checkpoint if asked to, run the loop, export the final policy."""
    from engine.model.tri_model import TriModel
    from engine.trainer import checkpoint
    from engine.trainer.loop import Loop
    from engine.trainer.policy import Policy

    base = Path(config.model.path)
    with_reference = config.algorithm.kl_coef > 0
    reference_hash = content_hash(base) if with_reference else None
    models = TriModel(
        read_shape(base),
        base,
        base if with_reference else None,
        config.algorithm.old_policy == "previous",
        config.rollout.temperature,
    )
    policy = Policy(config, models)
    root = arguments.folder / "checkpoints"
    found = checkpoint.latest(root) if arguments.resume else None
    start = checkpoint.load(found, policy, reference_hash) if found is not None else 0
    if start > config.train.steps:
        raise BadInput(f"--resume: the run has trained {start} steps already, train.steps is {config.train.steps}")
    trace = Trace(arguments.folder / "trace", control.replica)

    def save(step: int) -> None:
        with trace.span("checkpoint", step=step):
            checkpoint.save(root, step, policy, reference_hash, config.checkpoint.keep_last)

    def report(step: int, figures: dict[str, Any]) -> None:
        control.ask("report", step=step, figures=figures)

    rollouts = _rollouts(config, arguments, control, start)
    control.ask("ready", start=start)
    try:
        Loop(config, policy, rollouts, trace, report, save).run(start)
    finally:
        trace.flush()
    export(models, base, arguments.folder / "policy")


def _rollouts(config: Config, arguments: argparse.Namespace, control: ControlClient, start: int) -> Rollouts:
    if arguments.replay is not None:
        return Recorded(arguments.replay, config.train.prompts_per_step)
    live = Live(control, Publisher(control, FileTransport(arguments.weights)), config.train.micro_batch_tokens)
    return Recording(live, arguments.folder / "record.msgpack", start) if config.train.record else live


def export(models: Any, base: Path, target: Path) -> None:  # noqa: ANN401
    """Write the policy as a Hugging Face folder: the base model's configuration and tokenizer, our weights."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    skip = shutil.ignore_patterns("*.safetensors", "*.index.json", ".*")
    shutil.copytree(base, partial, ignore=skip)
    save_file(dict(models.export()), partial / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


if __name__ == "__main__":
    sys.exit(main())
