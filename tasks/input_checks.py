"""Quick checks of all inputs of a run, before anything slow starts; and the base model as a folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

from engine.config import Config
from engine.config.recipe import HOME
from engine.data.prepared import prepare
from engine.errors import BadInput
from engine.evaluation.benchmarks import read_benchmarks
from engine.launcher.checks import check_instances, check_rollouts, check_training
from engine.launcher.verifier_pool import VerifierPool
from engine.model.shape import read_shape
from engine.run.checkpoint_store import place_of
from engine.run.folder import RunFolder
from engine.run.identity import published
from tasks.console import say

QUICKSTART = "quickstart"
"""Value of `model.path` for the tiny model that Metronome makes itself."""


def check_run_folder(config: Config, resume: bool = False) -> None:
    """Check that a new run has a new folder, and that a resumed run has a folder, or checkpoints in `checkpoint.path`.

    Raises BadInput if not, and CheckpointError if `checkpoint.path` cannot be read.
    """
    folder = RunFolder(config.folder)
    if resume and not folder.config.exists() and not published(config):
        lost = (
            f", and {place_of(config)} (checkpoint.path) holds no complete checkpoint" if config.checkpoint.path else ""
        )
        raise BadInput(
            f"--resume: {folder.path} is no run folder{lost}; name the run to continue by --set run.name=NAME"
        )
    if folder.config.exists() and not resume:
        raise BadInput(
            f"run folder {folder.path} exists already; give another --set run.name=NAME, "
            "or continue that run with --resume"
        )


def check_inputs(config: Config, training: bool = True, sampling: bool = True) -> None:
    """Read the problems, load the reward, read the model's configuration. Raises BadInput for the first that fails.

    Without `training` (an evaluation) the trainer's layout is not checked. Without `sampling` (a replay) the run's own
    instances are not checked.
    """
    if config.run.dry:  # the commands that allow it do not call this
        raise BadInput(
            "run.dry only prints the plan of a recipe: `metronome run RECIPE --set run.dry=true`; set it to false here"
        )
    if training:
        prepare(config)
    for benchmark in read_benchmarks(config):
        if benchmark.note:
            say("warning", benchmark.note)
    scheme, separator, _ = config.checkpoint.path.partition("://")
    if separator and scheme not in ("s3", "file"):
        raise BadInput(f"checkpoint.path = {config.checkpoint.path!r}: expected a folder or s3://bucket/folder")
    asyncio.run(_try_reward(config))
    if config.rollout.top_p < 1 or config.rollout.top_k:
        say(
            "warning",
            "rollout.top_p or rollout.top_k restricts sampling: responses no longer come from the distribution that "
            "is trained, and the mismatch figures are not comparable",
        )
    if training and sampling:
        check_instances(config)
    if config.model.path != QUICKSTART:
        if training:
            check_training(config)
        else:
            check_rollouts(config)


async def _try_reward(config: Config) -> None:
    """Load the reward in a worker process, as in a run. So its import can neither end nor hang this process."""
    reward = config.reward.model_copy(update={"workers": 1})
    async with VerifierPool.of(reward, start_timeout_s=config.rollout.timeout_s):
        pass


def with_model_folder(config: Config) -> Config:
    """The config with `model.path` as an absolute folder. If the quickstart's model is not cached, it is made, and a
    line says so."""
    if config.model.path == QUICKSTART:
        from engine.tools.quickstart_model.warmup import ensure_quickstart_model  # imports torch: seconds

        lessons = HOME / "data/addition_train.jsonl"
        folder = ensure_quickstart_model(Path(config.run.output) / "models", lessons, report=_report)
    else:
        folder = Path(config.model.path).expanduser()
        read_shape(folder)
    model = config.model.model_copy(update={"path": str(folder.resolve())})
    return config.model_copy(update={"model": model})


def _report(line: str) -> None:
    say("base model", line.removeprefix("base model: "))
