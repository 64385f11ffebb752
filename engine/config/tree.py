"""The tables of a run as one tree, and what follows from several of them together."""

from __future__ import annotations

from pathlib import Path

from engine.config.cores import usable_cores
from engine.config.inputs import Data, DryRun, Model, Reward, Run
from engine.config.results import Evaluate, Tracking
from engine.config.rollouts import Rollout, Weights
from engine.config.table import Table
from engine.config.training import Algorithm, Attention, Checkpoint, Parallel, Platform, Train

WINDOW_PER_STAGE = 4
"""Micro-batches of a window per pipeline stage: a full window idles at most (p - 1) / (5p - 1) < 20 % of its time."""


class Tree(Table):
    """All tables. Their values are checked each by itself;
    `engine.config.Config` also checks what they demand of each other."""

    run: Run = Run()
    dry_run: DryRun = DryRun()
    model: Model = Model()
    data: Data = Data()
    reward: Reward = Reward()
    rollout: Rollout = Rollout()
    train: Train = Train()
    algorithm: Algorithm = Algorithm()
    attention: Attention = Attention()
    parallel: Parallel = Parallel()
    platform: Platform = Platform()
    weights: Weights = Weights()
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    tracking: Tracking = Tracking()

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.run.output) / self.run.name

    @property
    def window_tokens(self) -> int:
        """Token budget of a window. A pipeline idles for its depth in each window,
        so it may take several micro-batches."""
        pipeline = self.parallel.pipeline
        deep = self.parallel.pipeline > 1
        return self.train.micro_batch_tokens * self.parallel.lockstep * (WINDOW_PER_STAGE * pipeline if deep else 1)

    @property
    def trainer_threads(self) -> int:
        """Computing threads of a trainer rank: its own cores if it has some, else an even share."""
        return len(self.train.devices) // self.parallel.ranks or self._share

    @property
    def instance_threads(self) -> int:
        """Computing threads of a rollout instance: its own cores if it has some, else an even share."""
        return len(self.rollout.devices) // max(1, self.rollout.instances) or self._share

    def instance_cores(self, number: int) -> list[int]:
        """Those of `rollout.devices` that are instance `number`'s; [] leaves placing to the system."""
        share = len(self.rollout.devices) // max(1, self.rollout.instances)
        return self.rollout.devices[number * share : (number + 1) * share]

    @property
    def places_on_devices(self) -> bool:
        """Whether `rollout.devices` are accelerators, not cores, as far as the config says."""
        return self.rollout.engine == "vllm" and self.platform.device in ("cuda", "npu")

    @property
    def _share(self) -> int:
        return max(1, len(usable_cores()) // (self.parallel.ranks + self.rollout.instances))
