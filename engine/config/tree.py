"""The tables of a run as one tree, and the values that follow from several tables together."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from engine.config.inputs import Data, DryRun, Model, Reward, Run
from engine.config.marks import PLAN
from engine.config.results import Evaluate, Tracking
from engine.config.rollouts import Queue, Rollout, Weights
from engine.config.stages import REFERENCE_STAGE, Stage
from engine.config.table import Table
from engine.config.training import Algorithm, Attention, Checkpoint, Cluster, Parallel, Platform, Train


def foreign_cores(key: str, cores: Sequence[int]) -> str:
    """Return what is wrong with the cores that a key names on this machine, or "" if nothing is."""
    missing = sorted(set(cores) - usable_cores())
    return (
        f"{key} names cores {missing}, which this process can't use; it has {sorted(usable_cores())}" if missing else ""
    )


def usable_cores() -> set[int]:
    """Numbers of the CPU cores that this process may use; all of the machine where the system can't tell."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


WINDOW_PER_STAGE = 4
"""Micro-batches of a window per pipeline stage."""
WINDOWS_TOGETHER = 4
"""Windows that a replica group gets as one if their rows are waiting. A pipeline of p stages fills and drains once for
all of them, and then idles at most (p − 1) / (17p − 1) < 6 % of its time, but (p − 1) / (5p − 1) < 20 % for a full
window alone."""


class Tree(Table):
    """All tables. Each value is checked by itself; the rules between keys are checked by `engine.config.Config`."""

    run: Run = Run()
    dry_run: DryRun = DryRun()
    model: Model = Model()
    data: Data = Data()
    reward: Reward = Reward()
    rollout: Rollout = Rollout()
    queue: Queue = Queue()
    stages: Annotated[dict[str, Stage], PLAN] = {}
    """Stages beside generate, reward and train, by name."""
    train: Train = Train()
    algorithm: Annotated[Algorithm, PLAN] = Algorithm()
    attention: Annotated[Attention, PLAN] = Attention()
    parallel: Annotated[Parallel, PLAN] = Parallel()
    platform: Platform = Platform()
    cluster: Cluster = Cluster()
    weights: Weights = Weights()
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    tracking: Tracking = Tracking()

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.run.output) / self.run.name

    @property
    def compared_dtype(self) -> Literal["float32", "bfloat16"]:
        """The dtype whose rounding decides how far apart trainer and instances may be: the coarser of the two."""
        return "bfloat16" if "bfloat16" in (self.train.dtype, self.model.dtype) else "float32"

    @property
    def ratio_is_one(self) -> bool:
        """Whether the ratio π / π_old of every token is 1, as it is with the policy's own log-probabilities at the only
        update of a batch."""
        return self.algorithm.old_policy == "behavior" and self.train.updates == 1

    @property
    def window_tokens(self) -> int:
        """Token budget of a window. A pipeline idles while it fills and drains, once in each window, so its window may
        have several micro-batches."""
        pipeline = self.parallel.pipeline
        deep = self.parallel.pipeline > 1
        return self.train.micro_batch_tokens * self.parallel.lockstep * (WINDOW_PER_STAGE * pipeline if deep else 1)

    @property
    def most_together(self) -> int:
        """Largest number of micro-batches that a replica trains in one schedule of windows that are all there: those of
        `WINDOWS_TOGETHER` full windows under a pipeline, else 1, since without one nothing is won."""
        pipeline = self.parallel.pipeline
        return WINDOWS_TOGETHER * WINDOW_PER_STAGE * pipeline if pipeline > 1 else 1

    @property
    def groups_in_flight(self) -> int:
        """Whole groups in flight on one instance at a time: rollout.concurrency, or its share of a batch."""
        if self.rollout.concurrency != "all":
            return self.rollout.concurrency
        return math.ceil(self.train.prompts_per_step / max(1, self.rollout.instances + self.dry_run.joining))

    @property
    def slots(self) -> int:
        """Responses in flight on one instance at a time."""
        return self.groups_in_flight * self.rollout.group_size

    @property
    def least_window_tokens(self) -> int:
        """Tokens below which a window is not made smaller for the balance of the replica groups: 0 where a window is
        one micro-batch, else a micro-batch for each replica in lockstep."""
        return self.window_tokens if self.parallel.lockstep > 1 else 0

    @property
    def bubble_tokens(self) -> int:
        """Tokens that a replica group could train in the time that its pipeline of p stages fills and drains, once in
        each window: those of p − 1 micro-batches."""
        return self.train.micro_batch_tokens * self.parallel.lockstep * (self.parallel.pipeline - 1)

    @property
    def store_timeout_s(self) -> float:
        """Seconds that a call to TransferQueue may take, far less than a step. After that the run ends with the name of
        what did not answer, and can be resumed."""
        return self.train.timeout_s / 20

    @property
    def transfer_timeout_s(self) -> float:
        """Seconds that a trainer waits for the orchestrator, for other ranks or for a transfer.

        They are more than the orchestrator's own deadlines for an instance and its update, so that the orchestrator,
        which knows the names, gives up first.
        """
        return self.train.timeout_s + self.rollout.timeout_s + self.rollout.wait_s

    @property
    def trainer_threads(self) -> int:
        """Number of computing threads of a trainer rank: one for each of its own cores, or an even share of the
        process's cores if it has none."""
        return len(self.train.devices) // self.parallel.ranks or self._even_share

    @property
    def threads_per_core(self) -> float:
        """Computing threads on each core while trainer and own instances compute at the same time, at least 1. Above 1
        they slow each other down. 1 for accelerators, and where either side has cores of its own."""
        if self.train.devices or self.rollout.devices or self.platform.device not in ("auto", "cpu"):
            return 1.0
        threads = self.parallel.ranks * self.trainer_threads + self.scorer_ranks * self.scorer_threads
        return max(1.0, (threads + self.rollout.instances * self.instance_threads) / len(usable_cores()))

    @property
    def reward_weights(self) -> dict[str, float]:
        """Column → the weight with which it is added to the reward; only columns with a weight."""
        stages = [stage for stage in self.stages.values() if stage.reward_weight]
        return {column: stage.reward_weight for stage in stages for column in stage.gives}

    @property
    def reference_stage(self) -> Stage | None:
        """The stage that computes the reference on devices of its own; None where the trainer holds the reference."""
        return self.stages.get(REFERENCE_STAGE)

    def stage_layout(self, name: str) -> Parallel:
        """The layout of the ranks of [stages.NAME].

        Tensor ranks share the norms' work as the trainer's do; if the trainer has none, they do, because models with
        experts need it.
        """
        stage = self.stages[name]
        return Parallel(
            tensor=stage.tensor,
            pipeline=stage.pipeline,
            context=stage.context,
            data=stage.data,
            sequence=stage.tensor > 1 and (self.parallel.sequence or self.parallel.tensor == 1),
        )

    @property
    def scorer_ranks(self) -> int:
        """Number of ranks of [stages.reference], which a run has beside the trainer's; 0 without it."""
        return self.reference_stage.ranks if self.reference_stage is not None else 0

    @property
    def scorer_threads(self) -> int:
        """Number of computing threads of a rank of [stages.reference]: one for each of its own cores, or an even share
        of the process's cores if it has none."""
        stage = self.reference_stage
        return (len(stage.devices) // stage.ranks if stage is not None else 0) or self._even_share

    @property
    def instance_threads(self) -> int:
        """Number of computing threads of a rollout instance: one for each of its own cores, or an even share of the
        process's cores if it has none."""
        return len(self.rollout.devices) // max(1, self.rollout.instances) or self._even_share

    def instance_cores(self, number: int) -> list[int]:
        """The part of `rollout.devices` that belongs to instance `number`, from 0; [] leaves placing to the system."""
        share = len(self.rollout.devices) // max(1, self.rollout.instances)
        return self.rollout.devices[number * share : (number + 1) * share]

    @property
    def places_on_devices(self) -> bool:
        """Whether `rollout.devices` names accelerators rather than cores; False where platform.device is "auto"."""
        return self.rollout.engine == "vllm" and self.platform.device in ("cuda", "npu")

    @property
    def _even_share(self) -> int:
        """Cores that this process may use, per trainer rank, rank of the reference and own instance; at least 1."""
        processes = self.parallel.ranks + self.scorer_ranks + self.rollout.instances
        return max(1, len(usable_cores()) // processes)
