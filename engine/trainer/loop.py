"""The step loop (Algorithm 1 of Periodic Asynchrony), shared by all modes and all trainers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from torch import Tensor
from torch.profiler import record_function

from engine.config import Config
from engine.errors import MetronomeError, RatioGapError
from engine.run.trace import Trace
from engine.schedule import Schedule
from engine.trainer.rollouts import Rollouts
from engine.types import Group

Figures = dict[str, Any]
"""Figures of one step: the keys of steps.jsonl that the trainer knows, plus any that a trainer adds."""


class Trainer:
    """A trainer of one model, as the loop uses it. To write your own, inherit from this class and implement the four
    methods that raise NotImplementedError; the others are optional.

    `engine.trainer.policy` has the Megatron trainer, docs/examples/hf_trainer.py one in plain torch.
    """

    has_moved = False
    """Whether the step has changed the weights. If so, the weights from before the step can no longer be saved."""

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the policy's tensors under Hugging Face names, valid until the parameters change."""
        raise NotImplementedError

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities (temperature 1) under the policy of the tokens after the first."""
        raise NotImplementedError

    def prepare(self, window: Sequence[Group]) -> None:
        """Do the part of `accumulate` that needs no weights. The loop calls this for some windows, from another thread,
        while the previous window is being trained."""

    def accumulate(self, window: Sequence[Group]) -> None:
        """Add the gradient of the groups; do not step the optimizer."""
        raise NotImplementedError

    def update(self, responses: int) -> Mapping[str, Any]:
        """Make the step's updates and return their figures. `responses`: number of responses of each update, which
        determines the divisor of its gradient."""
        raise NotImplementedError

    def start_step(self, step: int) -> None:
        """Reset gradient and figures: a step begins, or is repeated."""

    def add_wait(self, seconds: float) -> None:
        """Count the seconds that the loop waited for groups."""

    def worst_gap(self) -> float:
        """Return the step's largest |π_trainer / π_rollout − 1| so far; 0 if it is not measured."""
        return 0.0

    def figures(self) -> Mapping[str, Any]:
        """Return figures of the step. Called after its updates."""
        return {}


@dataclass
class Seen:
    """What the loop has seen of a step on this rank. It serves trainers that keep no counts."""

    rewards: list[float] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    wait_s: float = 0.0
    """Seconds that the loop has waited for groups."""

    def add_window(self, window: Sequence[Group]) -> None:
        """Count the groups of a trained window."""
        self.groups += [group.index for group in window]
        self.rewards += [score.value for group in window for score in group.scores if not score.excluded]
        self.versions |= {version for group in window for one in group.responses for _, version in one.versions}

    def figures(self) -> Figures:
        """Return the figures by the keys of steps.jsonl. "groups" lists indices in the order of training."""
        return {
            "reward_mean": fmean(self.rewards or [0.0]),
            "groups": self.groups,
            "versions_seen": sorted(self.versions),
            "wait_s": self.wait_s,
        }


class Loop:
    """Trains the steps of a run.

    `report` is called after each step. `checkpoint` is called when a checkpoint is due, and with None for the figures
    when a step fails.
    """

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        rollouts: Rollouts,
        report: Callable[[int, Figures], None],
        trace: Trace | None = None,
        checkpoint: Callable[[int, Figures | None], None] = lambda step, figures: None,
        begin: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`trace` receives the spans for the timeline; `begin` is called before each step."""
        self.config = config
        self.trainer = trainer
        self.rollouts = rollouts
        self.trace = trace
        self.report = report
        self.checkpoint = checkpoint
        self.begin = begin
        self.schedule = Schedule.of(config.train, config.rollout.partial)
        self._started: dict[int, float] = {}
        """Time at which the rollouts of each step were started, by step."""
        self._seen = Seen()

    def run(self, start: int = 0) -> None:
        """Train steps `start` … `config.train.steps` − 1. Step N publishes weight version N and trains from it."""
        self.rollouts.begin(start)
        for step in range(start, self.config.train.steps):
            self.begin(step)
            began = time.perf_counter()
            self._start_step(step)
            try:
                with self._span("sync", step) as span:
                    sync_s = self.rollouts.publish(self.trainer, version=step)
                    span["bytes"] = self.rollouts.sent_bytes
                for batch in self.schedule.due(step, start, self.config.train.steps):
                    self._started[batch] = time.perf_counter()
                    self.rollouts.start(batch)
                check_s = self._verify(step)
                for window in self._arriving_windows(step):
                    self._train(step, window)
                updates = self.trainer.update(self._responses_per_update)
            except MetronomeError as error:
                self.rollouts.failed(error)
                if step and not self.trainer.has_moved:  # before step 0 they are those of the base model
                    self.checkpoint(step, None)  # the weights from before this step
                raise
            ended = time.perf_counter()
            figures = {**self._seen.figures(), **updates, **self.trainer.figures()}
            figures |= {
                "sync_s": sync_s,
                "check_s": check_s,
                "step_s": ended - began,
                "wait_ratio": figures["wait_s"] / (ended - began),
                "rollout_to_train_end_s": ended - self._started.pop(step),
            }
            self.report(step, figures)
            if self.trace is not None:
                self.trace.flush()
            if self._checkpoint_due(step + 1):
                self.checkpoint(step + 1, figures)

    def _start_step(self, step: int) -> None:
        self._seen = Seen()
        self.trainer.start_step(step)

    @property
    def _responses_per_update(self) -> int:
        train = self.config.train
        return train.prompts_per_step // train.updates * self.config.rollout.group_size

    def _verify(self, step: int) -> float:
        """Return the seconds that `Rollouts.verify` blocks. The instances keep sampling while it runs."""
        began = time.perf_counter()
        with self._span("check", step):
            self.rollouts.verify(self.trainer, version=step)
        return time.perf_counter() - began

    def _arriving_windows(self, step: int) -> Iterator[list[Group]]:
        """Yield the replica group's windows of the step. The time until each arrives counts as waiting."""
        arriving = self.rollouts.windows(step, self.trainer.prepare)
        while True:
            blocked = time.perf_counter()
            with self._span("wait", step):
                window = next(arriving, None)
            waited = time.perf_counter() - blocked
            self._seen.wait_s += waited
            self.trainer.add_wait(waited)
            if window is None:
                return
            yield window

    def _train(self, step: int, window: list[Group]) -> None:
        """Check the versions of the window's responses (docs/architecture.md, On-policy is checked), then train the
        window.

        Raises StaleRolloutError, or RatioGapError if trainer and instances disagree on the same tokens.
        """
        for group in window:
            self.schedule.check_versions(group)
        self.trainer.accumulate(window)
        self._seen.add_window(window)
        if self.schedule.ahead:
            return  # the policy has changed since the tokens were sampled; every sync still verifies the weights
        limit = self.config.train.ratio_gap_limit
        gap = self.trainer.worst_gap()
        if limit and not gap <= limit:
            raise RatioGapError(
                f"step {step}, prompts {[group.prompt.id for group in window]}: trainer and instances "
                f"{sorted({response.instance for group in window for response in group.responses})} disagree on the "
                f"same tokens: max|ratio - 1| = {gap:.3g}, limit train.ratio_gap_limit = {limit:.3g}. Their weights or "
                "their numerics differ"
            )

    @contextmanager
    def _span(self, name: str, step: int, **attributes: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401
        """Record the body in the trace and in the profile."""
        traced: AbstractContextManager[dict[str, Any]] = nullcontext({})
        if self.trace is not None:
            traced = self.trace.span(name, step=step, **attributes)
        with record_function(name), traced as found:
            yield found

    def _checkpoint_due(self, step: int) -> bool:
        every = self.config.checkpoint.every
        return step == self.config.train.steps or (every > 0 and step % every == 0)
