"""The Megatron trainer on one rank: gradients add up group by group, one update ends the step (Algorithm 1, 11–21)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.profiler import record_function

from engine.algorithm.losses import Terms
from engine.config import Config
from engine.errors import MetronomeError
from engine.model.build import compute_hidden, target_logprobs
from engine.model.flops import peak_of, training_flops
from engine.model.routing import take_counts
from engine.model.tri_model import TriModel, score_layouts
from engine.platform import Platform
from engine.run.trace import Trace
from engine.run.user_algorithms import advantage_of, find_loss
from engine.trainer.deferred_windows import DeferredWindows, Scored, check_scope
from engine.trainer.gradient_control import GradientControl
from engine.trainer.group_advantages import GroupAdvantages
from engine.trainer.loop import Trainer
from engine.trainer.micro_batches import MicroBatch, PackedWindows, trained_tokens
from engine.trainer.optimizer import LARGEST_NORM, is_sound, optimizer_of, scheduler_of
from engine.trainer.ranks.models import make_computation, open_models, packing_of
from engine.trainer.ranks.packing import join_windows
from engine.trainer.ranks.rank_group import RankGroup
from engine.trainer.step_metrics import (
    Advantages,
    RankMetrics,
    StepMetrics,
    StepSums,
    joined_advantages,
    sum_over_context,
)
from engine.types import Group, TrainingFigures, UpdateFigures

COMPUTING = ("forward-compute", "backward-compute")
"""Megatron's names of the timers around a micro-batch's computation. Its other timers measure waiting for
neighbours."""


class ComputeTimer:
    """Adds up the seconds of computation, and marks them as "forward" and "backward" in a profile. Megatron's schedules
    find it in `config.timers`.

    The seconds are measured on the host. Work queued on an accelerator counts at the point where the host waits for it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0
        self._name = ""
        self._span = record_function(self._name)

    def __call__(self, name: str, log_level: int = 0) -> ComputeTimer | NoTimer:
        """Return the timer with this name. Megatron's schedules call this."""
        if name not in COMPUTING:
            return NO_TIMER
        self._name = name.removesuffix("-compute")
        return self

    def start(self, barrier: bool = False) -> None:
        """Start timing the work of a micro-batch."""
        self._span = record_function(self._name)
        self._span.__enter__()
        self._started = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """Stop timing the work of a micro-batch."""
        self.seconds += time.perf_counter() - self._started
        self._span.__exit__(None, None, None)


class NoTimer:
    """A timer that measures nothing."""

    def start(self, barrier: bool = False) -> None:
        """Do nothing."""

    def stop(self, barrier: bool = False) -> None:
        """Do nothing."""


NO_TIMER = NoTimer()


class Policy(Trainer):
    """The policy, its frozen copies, the optimizer and the learning-rate schedule on one rank."""

    def __init__(
        self, config: Config, platform: Platform, ranks: RankGroup | None = None, trace: Trace | None = None
    ) -> None:
        """All ranks build this at the same time, inside a `session` of the platform. `trace` receives the spans of
        training."""
        self.trace = trace
        self.heartbeat: Callable[[], None] = lambda: None
        """Called after each held window is trained, because training all of them takes long."""
        self._step = 0
        self.has_moved = False
        self._traced = (0, 0)
        """Computed tokens and micro-batches of the step's windows that have been traced."""
        self.config = config
        self.platform = platform
        self.ranks = ranks or RankGroup(config.parallel.lockstep)
        self.models: TriModel = open_models(config, platform)
        self.packing = packing_of(config, make_computation(config, platform), self.ranks)
        self.group_advantages = GroupAdvantages(config.algorithm, config.rollout.max_new_tokens)
        self._packed = PackedWindows(self.packing)
        self.sums = StepSums(self.ranks, self.group_advantages, config.train.updates)
        self.advantages: Advantages = {}
        """Those of the last step whose `figures` were asked for, over all ranks."""
        algorithm = config.algorithm
        advantage_of(algorithm.advantage)  # raises now if a user's advantage is wrong
        self._loss = find_loss(algorithm.loss)
        check_scope(algorithm.loss, self._loss, config.train.mode)
        self._batch_scope = self._loss.scope != "group"
        self._held = DeferredWindows(self._loss, algorithm, self.ranks)
        self._statistics: tuple[float, ...] = ()
        sharded = config.train.distributed_optimizer
        self.ddp = DistributedDataParallel(
            self.models.policy.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=sharded
            ),
            self.models.policy,
        )
        self._pipelined = config.parallel.pipeline > 1
        self._busy = ComputeTimer()
        self.models.policy.config.timers = self._busy if self._pipelined or config.train.profile else None
        self.optimizer = optimizer_of(config, self.ddp)
        self.control = (
            GradientControl(config, self.ddp, self.optimizer) if algorithm.gradient_control != "none" else None
        )
        self._peak = peak_of(platform.device_name(self.models.device.index or 0))
        self._decided: bool | None = None
        self.scheduler = scheduler_of(config, self.optimizer)

    @property
    def metrics(self) -> StepMetrics:
        """This rank's figures for the step."""
        return self.sums.metrics

    def start_step(self, step: int = 0) -> None:
        """Reset gradients and metrics, including those of an unfinished step."""
        self._step = step
        self.has_moved = False
        self._traced = (0, 0)
        self.sums = StepSums(self.ranks, self.group_advantages, self.config.train.updates)
        self._held.clear_windows()
        take_counts(self.models.policy)
        self._start_update()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `TriModel.tensors`."""
        return self.models.tensors()

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """See `TriModel.probe`."""
        return self.models.probe(token_ids)

    def add_wait(self, seconds: float) -> None:
        """Count the seconds that the loop waited for groups."""
        self.metrics.add_wait(seconds)

    def _start_update(self) -> None:
        self._decided = None
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def prepare(self, window: Sequence[Group]) -> None:
        """Pack the window on the host. Raises BadInput if a user's advantage fails."""
        self._packed.pack_window(window, self.group_advantages)

    def accumulate(self, window: Sequence[Group]) -> None:
        """Score the groups under the frozen models and add their gradient; no optimizer step. Collective over the
        replica group.

        Groups of a later mini-batch and groups under a loss of batch scope are held; `update` adds their gradient.
        """
        started = time.time()
        self.sums.add_window(window)
        update = window[0].mini_batch
        scored = self._frozen_scores(self._packed.take_micro_batches(window, self.group_advantages))
        idle = None
        if update or self._batch_scope:
            self._hold_window(scored, update)
        else:
            idle = self._forward_backward(iter(scored), len(scored))
        self.sums.end_window()
        ended = time.time()
        self.metrics.train_s += ended - started
        tokens = sum(map(trained_tokens, window))
        self._trace_window(started, ended, idle, groups=[group.index for group in window], tokens=tokens)

    def _trace_window(
        self,
        started: float,
        ended: float,
        idle: float | None,
        **attributes: Any,  # noqa: ANN401
    ) -> None:
        """Trace a window, with the tokens and micro-batches that the step's sums have gained since the previous window.
        `idle`: seconds in which this pipeline stage was idle; None if it was not measured."""
        computed = (self.metrics.computed_tokens, self.metrics.micro_batches)
        tokens, count = (new - old for new, old in zip(computed, self._traced, strict=True))
        self._traced = computed
        if self.trace is not None:
            self.trace.add_span(
                "train", started, ended, step=self._step, computed_tokens=tokens, micro_batches=count, **attributes
            )
            if idle is not None:
                self.trace.add_span("bubble", ended - idle, ended, lane=f"{self.trace.role} bubble", step=self._step)

    def worst_gap(self) -> float:
        """Return the step's largest ratio gap so far in the replica group. Collective over the replica group."""
        return self.ranks.worst(self.metrics.max_ratio_gap)

    def _frozen_scores(self, batches: Sequence[MicroBatch]) -> list[Scored]:
        """Return the window's micro-batches with their log-probabilities under the old policy and the reference.

        The forward-only passes run before the window's pipeline schedule (1F1B).
        """
        started = time.perf_counter()
        with record_function("score"):
            old, reference = (self.frozen_logprobs(name, batches) for name in ("old", "reference"))
        self.metrics.score_s += time.perf_counter() - started
        return list(map(Scored, batches, old, reference))

    def frozen_logprobs(self, name: str, batches: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Return each micro-batch's [T] log-probabilities under the frozen model "old" or "reference"; None on all
        pipeline stages but the last. If the window has a column with the reference's, that column is used. Collective
        over the replica group."""
        if name == "reference" and all(batch.reference is not None for batch in batches):
            last = parallel_state.is_pipeline_last_stage()
            return [batch.reference if last else None for batch in batches]
        return list(self.models.score(name, [batch.layout for batch in batches]))

    def _hold_window(self, window: Sequence[Scored], update: int) -> None:
        """Hold a window until its update. The window is scored now, under the weights at the start of the step, if one
        of these needs the scores: the old policy ("behavior"), the comparison with the instances, or the statistics of
        the first update."""
        config = self.config
        behavior = config.algorithm.old_policy == "behavior"
        if behavior or config.train.mode in ("sync", "periodic") or (self._batch_scope and not update):
            found = self._policy_scores(window)
            for (batch, _, _, _), logprobs in zip(window, found, strict=True):
                if logprobs is not None:
                    self.sums.compare_logprobs(batch, logprobs)
            if self._batch_scope and not update:
                self._add_log_ratios(window, found)
            window = [
                scored._replace(old=logprobs if behavior else scored.old, compared=True)
                for scored, logprobs in zip(window, found, strict=True)
            ]
        self._held.add_window(window, update)

    def _policy_scores(self, window: Sequence[Scored]) -> list[Tensor | None]:
        """Return each micro-batch's [T] log-probabilities under the current policy. Collective over the replica
        group."""
        models = self.models
        layouts = [scored.batch.layout for scored in window]
        return score_layouts(models.policy, layouts, models.temperature)

    def _add_log_ratios(self, window: Sequence[Scored], found: Sequence[Tensor | None]) -> None:
        log_ratios = [
            None if logprobs is None else logprobs - self._old_logprobs(scored.batch, logprobs, scored.old)
            for scored, logprobs in zip(window, found, strict=True)
        ]
        self._held.add_log_ratios(window, log_ratios)

    def _train_held(self, update: int) -> None:
        """Train the held windows of an update. Collective over all ranks.

        They are all here, so a pipeline fills and drains once for many of them: micro-batches and their order are those
        of the windows. A loss of batch scope takes its statistics over the update's whole mini-batch, under the weights
        that the update starts from.
        """
        windows = join_windows(self._held.take_windows(update), self.config.most_together)
        if self._batch_scope:
            for window in windows if update else ():  # those of the first update were added on arrival
                self._add_log_ratios(window, self._policy_scores(window))
            self._statistics = self._held.statistics()
        for window in windows:
            started = time.time()
            idle = self._forward_backward(iter(window), len(window))
            self.sums.end_window()
            ended = time.time()
            self.metrics.train_s += ended - started
            self._trace_window(started, ended, idle)
            self.heartbeat()

    def _forward_backward(self, window: Iterator[Scored], count: int) -> float | None:
        """Run Megatron's schedule over a window's micro-batches; it adds their gradients to the buffers.

        Returns the seconds in which this pipeline stage was idle; None without a pipeline.
        """
        started = time.perf_counter()
        self._busy.seconds = 0.0
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=window,
            model=[self.ddp],
            num_microbatches=count,
            seq_length=1,  # unused with variable_seq_lengths
            micro_batch_size=1,
            forward_only=False,
        )
        return time.perf_counter() - started - self._busy.seconds if self._pipelined else None

    def _forward(
        self, window: Iterator[Scored], model: torch.nn.Module
    ) -> tuple[Tensor, partial[tuple[Tensor, Tensor, None]]]:
        """Run Megatron's forward step. Return the micro-batch's hidden states and the function that computes its loss
        from them."""
        scored = next(window)
        if self.ranks.feeds:
            layout = scored.batch.layout
            self.metrics.computed_tokens += layout.size
            self.metrics.operations += training_flops(self.models.shape, layout.segments) / layout.shards
            self.metrics.micro_batches += 1
        return compute_hidden(model, scored.batch.layout), partial(self._compute_loss, scored)

    def _compute_loss(self, scored: Scored, out: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the sum of the responses' losses, and 0 as Megatron's token count, because `reduce_gradients` does the
        division."""
        batch = scored.batch
        models = self.models
        logprobs, entropy = target_logprobs(models.policy, out, batch.layout, models.temperature)
        assert entropy is not None
        now = logprobs.detach()
        # a token that was not sampled has ratio 1, so that it counts in no figure
        old = torch.where(batch.sampled, self._old_logprobs(batch, logprobs, scored.old), now)
        terms = Terms(
            logprobs=logprobs,
            old=old,
            reference=scored.reference if self.config.algorithm.kl_coef else None,  # a reward may read it as well
            entropy=entropy,
            advantages=batch.advantages,
            weights=batch.weights,
            rollout=torch.where(batch.sampled, batch.rollout, now),
            response=batch.response,
            responses=len(batch.members),
            whole=sum_over_context,
            statistics=self._statistics,
            sampled=self._sampled_logprobs(batch, now, old),
        )
        loss = self._loss(terms, self.config.algorithm)
        if not scored.compared:
            self.sums.compare_logprobs(batch, now)
        self.sums.add_loss(batch, loss)
        return loss.total, torch.zeros((), dtype=torch.int, device=out.device), None

    def _old_logprobs(self, batch: MicroBatch, logprobs: Tensor, old: Tensor | None) -> Tensor:
        """Return the [T] log-probabilities in the denominator of the ratio, by `algorithm.old_policy`.

        `old`: log-probabilities under the old policy. With "behavior": under the weights at the start of the step if
        the policy may have moved since then, else None.
        """
        if self.config.algorithm.old_policy == "behavior":
            return logprobs.detach() if old is None else old
        if self.config.algorithm.old_policy == "rollout":
            return batch.rollout
        assert old is not None
        return old

    def _sampled_logprobs(self, batch: MicroBatch, logprobs: Tensor, old: Tensor) -> Tensor:
        """Return the trainer's [T] log-probabilities in the numerator of the mismatch weight.

        With "behavior" these are the old policy's (verl's decoupled loss). With "previous" they are those of the
        weights that sampled each token: the weights at the start of the step, or the old policy for tokens that are one
        update old. The config rejects `algorithm.mismatch` if older tokens can occur. With "rollout" only rejection
        reads them.
        """
        kind = self.config.algorithm.old_policy
        if kind == "previous":
            return torch.where(batch.behind, old, logprobs)
        return old if kind == "behavior" else logprobs

    def update(self, responses: int) -> UpdateFigures:
        """Make the step's updates (Algorithm 1, lines 18 to 21). Each update trains the windows held for it. Collective
        over all ranks.

        `responses`: number of responses of one update, prompts times group size. Raises MetronomeError if a figure of
        the loss or the gradient is not finite, BadInput if a user's gradient control fails.
        """
        seconds = 0.0
        norms = []
        for _ in range(self.config.train.updates):
            self.reduce_gradients(responses)
            began = time.time()
            self.control_gradient()  # before the weights change, since a user's code may fail
            self.has_moved = True
            self.models.copy_policy_to_old()
            norm, rate = self.step_optimizer()
            norms.append(norm)
            ended = time.time()
            seconds += ended - began
            if self.trace is not None:
                self.trace.add_span("update", began, ended, step=self._step)
        return {"update_s": seconds, "grad_norm": fmean(norms), "learning_rate": rate}

    def reduce_gradients(self, responses: int) -> None:
        """Divide the gradient of the step's next update by its denominator and reduce it over the replicas, once.

        `responses`: as in `update`. Held windows are trained first. Collective over all ranks, including those that got
        no group; they first wait for each other on the host. Raises MetronomeError if a figure of the loss or the
        gradient is not finite.
        """
        update = self.sums.update
        if update:
            self._start_update()
        self._train_held(update)
        denominator = self._denominator(responses)
        self.sums.denominators.append(denominator)
        self.ddp.scale_gradients(1.0 / denominator)
        with record_function("reduce"):
            finalize_model_grads([self.ddp], None)
        if self.ranks.worst(0.0 if is_sound(self.ddp) else 1.0, everyone=True):
            updates = self.config.train.updates
            name = "the update" if updates == 1 else f"update {update + 1} of {updates}"
            raise MetronomeError(
                f"the gradient of this step is not finite, or its norm is above {LARGEST_NORM:g}; {name} was not made "
                "(weights are unchanged). Look at the rewards and the advantages, or lower train.learning_rate"
            )

    def _denominator(self, responses: int) -> float:
        """Return the number that the summed gradient of an update is divided by.

        The loss's aggregation determines it. With an advantage of `only_unequal` it is multiplied by the share of
        unequal groups.
        """
        counts = self.sums.counts()
        divisor = self._loss.denominator(responses, counts.tokens, self.config.rollout.max_new_tokens)
        only_unequal = advantage_of(self.config.algorithm.advantage).only_unequal
        return divisor * counts.unequal / counts.groups if only_unequal and counts.unequal else divisor

    def control_gradient(self) -> None:
        """Let gradient control change the gradient or skip the update. Raises BadInput if a user's gradient control
        fails."""
        self._decided = self.control is None or self.control.act()

    def step_optimizer(self) -> tuple[float, float]:
        """Clip the gradient and step the optimizer. Returns (gradient norm before clipping, learning rate used).

        Calls `control_gradient` unless it was already called. If gradient control skips the update, nothing changes.
        """
        if self._decided is None:
            self.control_gradient()
        rate = float(self.optimizer.param_groups[0]["lr"])
        if not self._decided:
            return float(self.optimizer.get_grad_norm()), rate
        with record_function("optimizer"):
            _, norm, _ = self.optimizer.step()
        self.scheduler.step(increment=1)
        return float(norm), rate

    def figures(self) -> TrainingFigures:
        """Return the step's figures over all ranks, by the keys of steps.jsonl. Call this after the last update.
        Collective over all ranks."""
        self.metrics.expert_tokens = take_counts(self.models.policy)
        mine = RankMetrics(self.metrics, self.ranks.leader, self.platform.peak_bytes(), self.sums.advantages)
        ranks = self.ranks.gather(mine)
        self.advantages = joined_advantages(ranks)
        by_response = self._loss.aggregation == "response"
        merged = StepMetrics.merged(ranks, self.sums.denominators, by_response, self._peak)
        if not self.config.algorithm.kl_coef:
            del merged["kl"]  # there is no reference
        return {**merged, **self.control.figures()} if self.control is not None else merged
