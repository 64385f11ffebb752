"""Algorithm 1 of Periodic Asynchrony: the step loop that all modes share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from engine.config import Config
from engine.errors import MetronomeError, RatioGapError
from engine.trace import Trace
from engine.trainer.modes import check_versions
from engine.trainer.policy import Policy
from engine.trainer.source import Rollouts
from engine.types import Group


class Loop:
    """Trains steps `start` … `config.train.steps` − 1; calls `report` after each and `checkpoint` where one is due."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        rollouts: Rollouts,
        trace: Trace,
        report: Callable[[int, dict[str, Any]], None],
        checkpoint: Callable[[int], None],
    ) -> None:
        self.config = config
        self.policy = policy
        self.rollouts = rollouts
        self.trace = trace
        self.report = report
        self.checkpoint = checkpoint

    def run(self, start: int) -> None:
        """The loop. Weight version = number of updates so far = step."""
        denominator = self.config.train.prompts_per_step * self.config.rollout.group_size
        for step in range(start, self.config.train.steps):
            began = time.perf_counter()
            self.policy.start_step()
            try:
                with self.trace.span("sync", step=step):
                    sync_s = self.rollouts.publish(self.policy.models, version=step)
                self.rollouts.start(step)
                for window in self._arriving(step):
                    self._train(step, window)
                self.policy.reduce(denominator)
            except MetronomeError:
                self.checkpoint(step)  # the step is lost, the weights before it are not
                raise
            updated = time.perf_counter()
            with self.trace.span("update", step=step):
                self.policy.models.copy_policy_to_old()
                norm, rate = self.policy.update()
            ended = time.perf_counter()
            self.report(step, {"sync_s": sync_s, "update_s": ended - updated, "step_s": ended - began,
                               "grad_norm": norm, "learning_rate": rate, **self.policy.tally.figures()})
            self.trace.flush()
            if self._due(step + 1):
                self.checkpoint(step + 1)

    def _arriving(self, step: int) -> Iterator[list[Group]]:
        """The step's groups in windows, with the time blocked on each counted as waiting."""
        windows = self.rollouts.windows(step)
        while True:
            blocked = time.time()
            window = next(windows, None)
            self.trace.add("wait", blocked, time.time(), step=step)
            self.policy.tally.add_wait(time.time() - blocked)
            if window is None:
                return
            yield window

    def _train(self, step: int, window: list[Group]) -> None:
        """Contract 1, then forward and backward of the window."""
        for group in window:
            check_versions(group, self.config.train.mode)
        with self.trace.span("train", step=step, groups=[group.index for group in window]):
            self.policy.accumulate(window)
        limit, gap = self.config.train.ratio_gap_limit, self.policy.tally.max_ratio_gap
        if limit and not gap <= limit:
            raise RatioGapError(
                f"step {step}, prompts {[group.prompt.id for group in window]}: trainer and instances "
                f"{sorted({response.instance for group in window for response in group.responses})} disagree on the same "
                f"tokens: max|ratio - 1| = {gap:.3g}, limit train.ratio_gap_limit = {limit:.3g}. Their weights or their "
                "numerics differ: a weight sync went wrong, or sampling is not comparable (rollout.top_p, rollout.top_k)"
            )

    def _due(self, step: int) -> bool:
        every = self.config.checkpoint.every
        return step == self.config.train.steps or (every > 0 and step % every == 0)
