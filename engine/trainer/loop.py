"""Algorithm 1 of Periodic Asynchrony: the step loop that all modes share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean
from typing import Any

from engine.config import Config
from engine.errors import MetronomeError, RatioGapError
from engine.run.trace import Trace
from engine.schedule import Schedule
from engine.trainer.micro_batches import trained_tokens
from engine.trainer.policy import Policy
from engine.trainer.rollouts import Rollouts, Work
from engine.types import Group, Landed, StepFigures, UpdateFigures


class Loop:
    """Trains the steps of a run.

    `report` is called after each step. `checkpoint` is called where one is due, and without figures when a step fails.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        rollouts: Rollouts,
        trace: Trace,
        report: Callable[[int, StepFigures], None],
        checkpoint: Callable[[int, StepFigures | None], None],
    ) -> None:
        self.config = config
        self.policy = policy
        self.rollouts = rollouts
        self.trace = trace
        self.report = report
        self.checkpoint = checkpoint
        self.schedule = Schedule.of(config.train, config.rollout.partial)
        self._moved = False
        """Whether the step has made an update. From then on there are no weights from before the step to save."""
        self._computed = (0, 0)
        """Computed tokens and micro-batches of the step's windows that are traced."""
        self._started: dict[int, float] = {}
        """By step, when its rollouts were started."""

    def run(self, start: int) -> None:
        """Train steps `start` … `config.train.steps` − 1. Step N publishes weight version N and trains from it."""
        for step in range(start, self.config.train.steps):
            began = time.perf_counter()
            self.policy.start_step()
            self._moved = False
            self._computed = (0, 0)
            try:
                with self.trace.span("sync", step=step) as span:
                    sync_s = self.rollouts.publish(self.policy.models, version=step)
                    span["bytes"] = self.rollouts.sent_bytes
                for batch in self.schedule.due(step, start, self.config.train.steps):
                    self._started[batch] = time.perf_counter()
                    self.rollouts.start(batch)
                check_s = self._verify(step)
                for work in self._arriving_work(step):
                    self._score_or_train(step, work)
                self.rollouts.settle()
                updates = self._update(step)
            except MetronomeError as error:
                self.rollouts.failed(error)
                if not self._moved:
                    self.checkpoint(step, None)  # the weights from before this step
                raise
            ended = time.perf_counter()
            trained = self.policy.figures()
            figures: StepFigures = {
                "sync_s": sync_s,
                "check_s": check_s,
                "step_s": ended - began,
                "wait_ratio": trained["wait_s"] / (ended - began),
                "rollout_to_train_end_s": ended - self._started.pop(step),
                **updates,
                **trained,
            }
            self.report(step, figures)
            self.trace.flush()
            if self._checkpoint_due(step + 1):
                self.checkpoint(step + 1, figures)

    def _update(self, step: int) -> UpdateFigures:
        """Make the step's updates. Each trains what is held for it, and needs every rank."""
        train = self.config.train
        responses = train.prompts_per_step // train.updates * self.config.rollout.group_size
        seconds = 0.0
        norms = []
        for _ in range(train.updates):
            self.policy.reduce(responses, partial(self._held_window_trained, step))
            began = time.perf_counter()
            self.policy.decide()  # before the weights change, since a user's code may fail
            self._moved = True
            with self.trace.span("update", step=step):
                self.policy.models.copy_policy_to_old()
                norm, rate = self.policy.update()
            norms.append(norm)
            seconds += time.perf_counter() - began
        return {"update_s": seconds, "grad_norm": fmean(norms), "learning_rate": rate}

    def _verify(self, step: int) -> float:
        """Return the seconds that `Rollouts.verify` blocks; the instances sample meanwhile."""
        began = time.perf_counter()
        with self.trace.span("check", step=step):
            self.rollouts.verify(self.policy.models, version=step)
        return time.perf_counter() - began

    def _arriving_work(self, step: int) -> Iterator[Work]:
        """Yield the unit's work of the step; the time until each piece arrives is counted as waiting."""
        arriving = self.rollouts.work(step)
        while True:
            blocked = time.perf_counter()
            with self.trace.span("wait", step=step):
                work = next(arriving, None)
            self.policy.metrics.add_wait(time.perf_counter() - blocked)
            if work is None:
                return
            yield work

    def _score_or_train(self, step: int, work: Work) -> None:
        landed = [item for item in work if isinstance(item, Landed)]
        if landed:
            with self.trace.span("score", step=step, responses=len(landed)):
                self.policy.score_early(landed)
        else:
            self._train(step, [item for item in work if isinstance(item, Group)])

    def _train(self, step: int, window: list[Group]) -> None:
        """Check the versions of the window's responses (docs/architecture.md, On-policy is checked), then train it.

        Raises StaleRolloutError, and RatioGapError if trainer and instances disagree on the same tokens.
        """
        for group in window:
            self.schedule.check(group)
        started = time.time()
        idle = self.policy.accumulate(window)
        ended = time.time()
        self._trace_window(
            step,
            started,
            ended,
            groups=[group.index for group in window],
            tokens=sum(map(trained_tokens, window)),
        )
        if idle is not None:
            self.trace.add("bubble", ended - idle, ended, lane=f"{self.trace.role} bubble", step=step)
        if self.schedule.ahead:
            return  # the policy has changed since the tokens were sampled; every sync still verifies the weights
        limit = self.config.train.ratio_gap_limit
        gap = self.policy.worst_gap()
        if limit and not gap <= limit:
            raise RatioGapError(
                f"step {step}, prompts {[group.prompt.id for group in window]}: trainer and instances "
                f"{sorted({response.instance for group in window for response in group.responses})} disagree on the "
                f"same tokens: max|ratio - 1| = {gap:.3g}, limit train.ratio_gap_limit = {limit:.3g}. Their weights or "
                "their numerics differ: a weight sync went wrong, or sampling is not comparable (rollout.top_p, "
                "rollout.top_k)"
            )

    def _held_window_trained(self, step: int, started: float, ended: float) -> None:
        """Trace a held window that was trained, and send the launcher a sign of life: training them all takes long."""
        self._trace_window(step, started, ended)
        self.rollouts.heartbeat()

    def _trace_window(self, step: int, started: float, ended: float, **attributes: Any) -> None:  # noqa: ANN401
        """Trace a window, with what it computed: what the step's sums have grown by since the last one."""
        metrics = self.policy.metrics
        computed = (metrics.computed_tokens, metrics.micro_batches)
        tokens, count = (new - old for new, old in zip(computed, self._computed, strict=True))
        self._computed = computed
        self.trace.add("train", started, ended, step=step, computed_tokens=tokens, micro_batches=count, **attributes)

    def _checkpoint_due(self, step: int) -> bool:
        every = self.config.checkpoint.every
        return step == self.config.train.steps or (every > 0 and step % every == 0)
